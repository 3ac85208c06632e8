#pragma once

#include <chrono>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/world.h"

namespace lockstep {

/// Facts about the other ranks, known once all have appeared.
struct RollCall {
  int machines = 1;
  int most_on_a_machine = 1;  ///< ranks
  int local_rank = 0;
  int local_world_size = 1;
  int threads = 1;  ///< this rank's fair share of its machine
};

/// A member of ContextOptions that must be the same on all ranks, in words.
struct Setting {
  std::string name, value;
};

/// The store that the ranks of the world share, with keys that no earlier ranks have used, neither of an earlier
/// Context nor of a start that torchrun's agent repeated. Undefined for a world of one. Throws Error naming missing
/// ranks after the timeout.
/// REQUIRES: every rank calls it.
c10::intrusive_ptr<c10d::Store> open_fresh_store(const World& world, std::chrono::milliseconds timeout);

/// Waits until every rank of the world has announced itself. Throws Error naming the missing ranks after the timeout.
/// Throws on every rank if one has another version of Lockstep or LibTorch than rank 0, or other `settings`.
/// REQUIRES: every rank calls it.
RollCall wait_for_all_ranks(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                            std::chrono::milliseconds timeout, const std::vector<Setting>& settings);

/// Waits until all ranks have said farewell, or for the timeout. Never throws.
void say_farewell(const World& world, const c10::intrusive_ptr<c10d::Store>& store,
                  std::chrono::milliseconds timeout) noexcept;

}  // namespace lockstep
