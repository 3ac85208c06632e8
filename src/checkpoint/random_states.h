#pragma once

#include <vector>

#include <ATen/core/Dict.h>

#include "base/virtual_ranks.h"

namespace lockstep {

/// The states of this process's random generators, as Python's get_rng_state() returns them: "random" for the CPU's
/// and, if this process uses CUDA, "random_cuda", a list by device as from torch.cuda.get_rng_state_all().
constexpr const char* kRandom = "random";
constexpr const char* kRandomCuda = "random_cuda";

/// With virtual ranks there is also "random_virtual": the CPU generator's states of this process's virtual ranks, in
/// order. "random" is then the state between them.
constexpr const char* kRandomVirtual = "random_virtual";

/// `virtual_ranks` is null if none.
void save_random_states(c10::impl::GenericDict& into, const VirtualRanks* virtual_ranks);

/// Warns about states that cannot be restored because this process sees a different number of CUDA devices.
void restore_random_states(const c10::impl::GenericDict& from);

/// Restores the CPU generator's states from those that all ranks saved, on any number of ranks with the same number of
/// virtual ranks. Throws Error unless there is a state for each.
void restore_random_states(const std::vector<c10::impl::GenericDict>& ranks, VirtualRanks& virtual_ranks);

}  // namespace lockstep
