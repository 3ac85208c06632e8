#pragma once

#include <cstdint>
#include <optional>

#include "collectives/shm/protocol/eager_ring.h"
#include "collectives/shm/protocol/finished_counts.h"
#include "collectives/shm/protocol/operation.h"
#include "collectives/shm/segment/arena.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Announces this rank's collectives to the others: copies small data to where they read it, and writes the line that
/// says where all of it lies. Guarded by the communicator's mutex.
class Announcer {
 public:
  Announcer(const World& world, const Arena& arena, const Limits& limits, FinishedCounts& finished)
      : world_(world), arena_(arena), limits_(limits), finished_(finished), eager_(world.geometry().eager_bytes) {}

  /// The operation's line is free. False if there is no room for its data yet; adds to `blocked_on` the ranks that
  /// still use some.
  bool announce(Operation& operation, uint64_t& blocked_on);

 private:
  bool place_package(Operation& operation, Line& line, uint64_t& blocked_on);
  std::optional<size_t> allocate_eager(uint64_t sequence, size_t bytes, bool until_here, uint64_t& blocked_on);

  const World& world_;
  const Arena& arena_;
  const Limits& limits_;
  FinishedCounts& finished_;
  EagerRing eager_;
};

}  // namespace lockstep::shm
