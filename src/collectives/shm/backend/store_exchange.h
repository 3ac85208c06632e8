#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/shm/segment/bootstrap.h"
#include "rendezvous/generation.h"

namespace lockstep::shm_engine {

/// lockstep::exchange_texts over a store of c10d's.
shm::AllGather exchange_over(c10::intrusive_ptr<c10d::Store> store, int rank, int world_size,
                             std::chrono::milliseconds timeout);

/// lockstep::agree_on_generation in a store of c10d's.
Generation agree_on_generation(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout);

}  // namespace lockstep::shm_engine
