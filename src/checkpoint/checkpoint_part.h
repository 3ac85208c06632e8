#pragma once

#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/core/Dict.h>

#include <lockstep/checkpointer.h>

#include "checkpoint/memory/kept_state.h"

namespace lockstep {

/// One part of the program's state, under its name in the file.
struct CheckpointPart {
  std::string name;
  Checkpointer::Part part;
  Checkpointer::Scope scope;
  const torch::nn::Module* module = nullptr;  ///< null for other parts
  /// A model whose parameters, except the ignored ones, are equal on all ranks; null for other parts.
  torch::nn::Module* replicas = nullptr;
  std::set<std::string> ignored = {};
  std::vector<int> replica_ranks = {};  ///< numbers among all ranks; empty: not known
  /// The number of backward passes that make a step of the replicas; 0: not set yet. Null for other parts.
  std::function<int()> accumulation = nullptr;
  /// The part's state as slices on the ranks of a group; none if each rank has all of it. Null if it never lies in
  /// slices.
  std::function<std::optional<c10::IValue>(const Group& group)> save_in_slices = nullptr;
  /// Whether no rank may hold all of these slices. The whole checkpoint is then written piece by piece, before save()
  /// returns. Null: false.
  std::function<bool()> is_never_whole = nullptr;
  /// The elements of such a state that part.load() uses on this rank. Null: all.
  std::function<std::vector<detail::ElementRange>(const c10::IValue& state)> elements_to_load = nullptr;

  bool lies_in_slices() const { return is_never_whole && is_never_whole(); }
};

// Keys of the dictionary in the file, besides the parts' names.
constexpr const char* kStepKey = "step";
constexpr const char* kAccumulationKey = "accumulated_passes";
constexpr const char* kVirtualRanksKey = "virtual_ranks";  ///< their number; missing: none
constexpr const char* kThreadsKey = "threads";             ///< that an operator used, with virtual ranks

inline c10::impl::GenericDict new_dict() { return c10::impl::GenericDict(c10::AnyType::get(), c10::AnyType::get()); }

}  // namespace lockstep
