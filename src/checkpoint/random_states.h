#pragma once

#include <ATen/core/Dict.h>

namespace lockstep {

/// The states of this process's generators, as Python's get_rng_state() has them: "random" of the CPU's, and, if this
/// process uses CUDA, "random_cuda", a list by device as of torch.cuda.get_rng_state_all().
constexpr const char* kRandom = "random";
constexpr const char* kRandomCuda = "random_cuda";

void save_random_states(c10::impl::GenericDict& into);

/// Warns of what is there but cannot be restored: states of another number of CUDA devices than this process sees.
void restore_random_states(const c10::impl::GenericDict& from);

}  // namespace lockstep
