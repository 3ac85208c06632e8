#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/protocol/operation.h"
#include "collectives/shm/protocol/rounds.h"
#include "collectives/shm/segment/populated_ranges.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// Moves the data of one collective after the other, each by its method, once all ranks' announcements agree. Nothing
/// here waits. Guarded by the communicator's mutex.
class Mover {
 public:
  explicit Mover(const World& world) : world_(world), area_{.rounds = world.mine().drained.load()} {}

  /// See Communicator::share_out_by.
  void share_out_by(ShareOut share_out) { share_out_ = std::move(share_out); }

  /// Does what can be done now. True when the operation is over for this rank; else adds to `blocked_on` the ranks that
  /// it waits for.
  bool move(Operation& operation, uint64_t& blocked_on) {
    switch (operation.method) {
      case Method::kInline:
      case Method::kEager:
        return move_at_once(operation);
      case Method::kInPlace:
        return move_in_place(operation, blocked_on);
      case Method::kRounds:
        return move_in_rounds(operation, blocked_on);
    }
    return true;
  }
  /// That operation is over: the next one's rounds come after its.
  void finish(const Operation& operation);

  /// Of large operations, in all.
  uint64_t rounds_moved() const { return rounds_moved_; }

 private:
  bool move_at_once(Operation& operation);
  bool move_in_place(Operation& operation, uint64_t& blocked_on);
  bool move_in_rounds(Operation& operation, uint64_t& blocked_on);
  void reduce_own_slice(Operation& operation);
  /// Copies that rank's slice of the sums out of where this rank's data were staged, if they were.
  void take_slice(const Operation& operation, int from);

  const World& world_;
  /// Of the operations that are over; the same on all ranks.
  ChunkArea area_;
  uint64_t rounds_moved_ = 0;
  /// Of the others' resident areas.
  std::array<PopulatedRanges, kMaxRanks> populated_;
  ShareOut share_out_;  ///< may be null
};

}  // namespace lockstep::shm
