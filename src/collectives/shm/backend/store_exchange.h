#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/shm/bootstrap.h"

namespace lockstep::shm_engine {

/// Lets the ranks that share `store`, and nobody else, tell each other texts. Each call uses keys of its own, and what
/// earlier ranks have left in the store (generation.h) is not taken for theirs.
/// A call throws Error naming the ranks that did not come when `timeout` has passed.
shm::AllGather exchange_over(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             std::chrono::milliseconds timeout);

}  // namespace lockstep::shm_engine
