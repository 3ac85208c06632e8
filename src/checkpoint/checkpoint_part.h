#pragma once

#include <string>
#include <vector>

#include <ATen/core/Dict.h>

#include <lockstep/checkpointer.h>

namespace lockstep {

/// One part of the program's state, under its name in the file.
struct CheckpointPart {
  std::string name;
  Checkpointer::Part part;
  Checkpointer::Scope scope;
};

// Beside the parts, the dictionary in the file has these.
constexpr const char* kStepKey = "step";
constexpr const char* kRanksKey = "ranks";  ///< what each rank has of its own, a list of .pt files in uint8 tensors

inline c10::impl::GenericDict new_dict() { return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()); }

}  // namespace lockstep
