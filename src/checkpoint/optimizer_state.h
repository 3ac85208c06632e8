#pragma once

#include <optional>

#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

#include <lockstep/group.h>

namespace lockstep {

/// load_optimizer_state_dict() of tensors that nobody changes, such as those of a mapped file: an optimizer that adopts
/// its state (master_weights.h) keeps them until its next step, so that no rank has all of it in private memory.
void adopt_optimizer_state_dict(torch::optim::Optimizer& optimizer, const c10::IValue& state);

/// optimizer_state_dict() as it lies, without messages, where each rank of `group` has memory for a slice of it only
/// (sliced_memory.h); none elsewhere. On a device every rank then has the whole state, and a save() that follows sends
/// nothing. Every rank calls it.
std::optional<c10::IValue> optimizer_state_in_slices(const torch::optim::Optimizer& optimizer, const Group& group);

}  // namespace lockstep
