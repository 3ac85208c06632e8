#pragma once

#include <lockstep/comm_hook.h>

namespace lockstep {

/// The group's own reduction of `tensor`, in place.
CommHook::Finish reduce_plainly(const at::Tensor& tensor, ReduceOp op, const Group& group);

/// A hook's tensors by name, for load_state_dict: throws Error if a name is not known.
const at::Tensor& state_entry(const StateDict& state, const std::string& name);

}  // namespace lockstep
