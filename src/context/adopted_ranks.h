#pragma once

#include <chrono>
#include <functional>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/context.h>

#include "collectives/group_state.h"

namespace lockstep {

/// Ranks that something else than a launcher's variables has brought together, and that it connects.
struct AdoptedRanks {
  int rank;
  int world_size;
  c10::intrusive_ptr<c10d::Store> store;  ///< of all ranks, fresh; unused in a world of one
  /// `one_machine`: all ranks share memory.
  std::function<BackendFactory(const ContextOptions& options, bool one_machine)> engine;
  /// This rank leaves: waits for the others that long.
  std::function<void(std::chrono::milliseconds)> say_farewell;
};

/// Their Context. Every rank calls it.
Context adopt_ranks(AdoptedRanks ranks, ContextOptions options);

/// ContextOptions::join_timeout, or what the environment says instead.
std::chrono::milliseconds join_timeout_of(const ContextOptions& options);

}  // namespace lockstep
