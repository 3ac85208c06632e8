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
      : world_(world),
        arena_(arena),
        limits_(limits),
        finished_(finished),
        eager_(world.geometry().eager_bytes, EagerRing::Prefer::kLowest),
        cold_(world.geometry().cold_bytes, EagerRing::Prefer::kNext) {}

  /// Commits the memory that such an operation may need of this rank. Throws Error if memory is short.
  void commit_for(const Request& request);

  /// The operation's line is free. False if there is no room for its data yet; adds to `blocked_on` the ranks that
  /// still use some.
  bool announce(Operation& operation, uint64_t& blocked_on);

 private:
  bool place_package(Operation& operation, Line& line, uint64_t& blocked_on);
  /// Whether a package goes to memory that nobody caches.
  bool is_cold(const Request& request, size_t bytes, bool resident) const {
    return has_root(request.kind) && !resident && bytes > limits_.warm && bytes <= limits_.cold;
  }
  bool is_resident(const Request& request, const Transfer& transfer) const;
  std::optional<size_t> allocate(EagerRing& ring, uint64_t sequence, size_t bytes, bool until_here,
                                 uint64_t& blocked_on);
  void commit(size_t begin, size_t bytes, bool& is_done);

  const World& world_;
  const Arena& arena_;
  const Limits& limits_;
  FinishedCounts& finished_;
  EagerRing eager_, cold_;
  bool cold_is_committed_ = false, area_is_committed_ = false;  ///< the area: of rounds
};

}  // namespace lockstep::shm
