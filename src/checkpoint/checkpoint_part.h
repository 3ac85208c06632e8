#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>

#include <lockstep/checkpointer.h>

#include "checkpoint/memory/state_keys.h"

namespace lockstep {

/// One part of the program's state, under its name in the file.
struct CheckpointPart {
  std::string name;
  Checkpointer::Part part;
  Checkpointer::Scope scope;
  /// A model whose parameters are equal on all ranks but for the ignored ones; null for other parts.
  torch::nn::Module* replicas = nullptr;
  std::set<std::string> ignored = {};
  /// How many backward passes make a step of the replicas; 0: not said yet. Null for other parts.
  std::function<int()> accumulation = nullptr;
  /// Its state as it lies in slices on the ranks of a group; none where a rank has all of it. Null: it never does.
  std::function<std::optional<c10::IValue>(const Group& group)> save_in_slices = nullptr;
};

// Beside the parts, the dictionary in the file has these.
constexpr const char* kStepKey = "step";
constexpr const char* kAccumulationKey = "accumulated_passes";
constexpr const char* kVirtualRanksKey = "virtual_ranks";  ///< their number; missing: there are none
constexpr const char* kThreadsKey = "threads";             ///< that an operator used, with virtual ranks

inline c10::impl::GenericDict new_dict() { return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()); }

}  // namespace lockstep
