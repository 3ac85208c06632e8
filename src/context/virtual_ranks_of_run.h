#pragma once

#include <memory>

#include <lockstep/context.h>

#include "base/environment.h"
#include "base/virtual_ranks.h"

namespace lockstep {

/// The program's number of virtual ranks, else the environment's, else 0. Throws Error if it is below the number of
/// ranks.
int choose_virtual_ranks(const ContextOptions& options, const Environment& environment, int world_size);

/// This rank's virtual ranks, with generators seeded by their numbers. Seeds torch's generator in the same way on all
/// ranks. Throws Error on all ranks unless they agree on numbers and threads.
/// REQUIRES: every rank calls it.
std::shared_ptr<VirtualRanks> make_virtual_ranks(const ContextOptions& options, const Group& group, int threads);

}  // namespace lockstep
