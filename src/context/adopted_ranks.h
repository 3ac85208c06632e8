#pragma once

#include <chrono>
#include <functional>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <lockstep/context.h>

#include "collectives/group_state.h"

namespace lockstep {

/// Ranks that are already connected, by other means than a launcher's variables.
struct AdoptedRanks {
  int rank;
  int world_size;
  c10::intrusive_ptr<c10d::Store> store;  ///< shared by all ranks, fresh; unused in a world of one
  /// `one_machine`: all ranks share memory.
  std::function<BackendFactory(const ContextOptions& options, bool one_machine)> engine;
  /// Called when this rank leaves: waits for the others for this long.
  std::function<void(std::chrono::milliseconds)> say_farewell;
};

/// The Context of these ranks.
/// REQUIRES: every rank calls it.
Context adopt_ranks(AdoptedRanks ranks, ContextOptions options);

/// ContextOptions::join_timeout, unless the environment overrides it.
std::chrono::milliseconds join_timeout_of(const ContextOptions& options);

}  // namespace lockstep
