#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::shm_engine {

/// What the ranks that meet in a store have agreed on.
struct Generation {
  std::string prefix;        ///< of keys that these ranks use, and no earlier ones did
  std::vector<int> missing;  ///< not empty: the time was over, these had not come, and there is no prefix
};

/// Lets the ranks that live find each other in a store that may hold what earlier ones left: torchrun's agent keeps its
/// store when it restarts its ranks, and a process can form the same group twice. Every rank calls it. No rank returns
/// a prefix before all have called; equal on all ranks, and never returned before in this store.
/// Throws what the store throws, such as when whoever serves it is gone.
Generation agree_on_generation(c10d::Store& store, int rank, int world_size, std::chrono::milliseconds timeout);

}  // namespace lockstep::shm_engine
