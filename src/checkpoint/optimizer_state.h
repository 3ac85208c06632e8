#pragma once

#include <optional>
#include <vector>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/group.h>
#include <lockstep/state_in_slices.h>

namespace lockstep {

/// load_optimizer_state_dict() for tensors that are never changed, such as those of a mapped file. An optimizer that
/// adopts its state (master_weights.h) keeps them until its next step, so that no rank has all of it in private memory.
void adopt_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);

/// Whether no rank may hold all of its state (KeepsSlices::is_never_whole).
bool is_never_whole(const torch::optim::Optimizer& optimizer);

/// optimizer_state_dict() without messages, in slices, if each rank of `group` has memory only for a slice of it
/// (sliced_memory.h); none otherwise. On a device every rank then has the whole state, and a following save() sends
/// nothing.
/// REQUIRES: every rank calls it.
std::optional<c10::IValue> optimizer_state_in_slices(const torch::optim::Optimizer& optimizer, const Group& group);

/// The elements of such a state that adopt_optimizer_state_dict() and the next step use on this rank.
std::vector<detail::ElementRange> elements_to_load(const torch::optim::Optimizer& optimizer, const c10::IValue& state);

}  // namespace lockstep
