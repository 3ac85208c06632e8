#pragma once

#include <lockstep/comm_hook.h>

namespace lockstep {

/// The group's own reduction of `tensor`, in place.
CommHook::Finish reduce_plainly(const at::Tensor& tensor, ReduceOp op, const Group& group);

/// The inner hook's description, for describe() of a hook that processes its result.
std::string described(const CommHookPtr& inner);

/// The tensor of that name in a hook's state, for load_state_dict(). Throws Error if there is none.
const at::Tensor& state_entry(const StateDict& state, const std::string& name);

}  // namespace lockstep
