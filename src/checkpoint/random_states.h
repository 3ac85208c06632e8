#pragma once

#include <ATen/core/Dict.h>

namespace lockstep {

/// The states of this process's random generators, as Python's get_rng_state() returns them: "random" for the CPU's
/// and, if this process uses CUDA, "random_cuda", a list by device as from torch.cuda.get_rng_state_all().
constexpr const char* kRandom = "random";
constexpr const char* kRandomCuda = "random_cuda";

void save_random_states(c10::impl::GenericDict& into);

/// Warns about states that cannot be restored: those of another number of CUDA devices than this process sees.
void restore_random_states(const c10::impl::GenericDict& from);

}  // namespace lockstep
