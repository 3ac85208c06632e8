#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/shm/bootstrap.h"

namespace lockstep::shm_engine {

/// An all-gather of texts between the ranks that share `store`. Each call uses its own keys, and ignores what earlier
/// ranks have left in the store (generation.h). A call throws Error naming the missing ranks when `timeout` has passed.
shm::AllGather exchange_over(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             std::chrono::milliseconds timeout);

}  // namespace lockstep::shm_engine
