#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>

#include "collectives/shm/protocol/announcer.h"
#include "collectives/shm/protocol/finished_counts.h"
#include "collectives/shm/protocol/mover.h"
#include "collectives/shm/protocol/operation.h"
#include "collectives/shm/segment/arena.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// The collectives of one rank that are in flight, in order: each is announced as soon as there is room, and the first
/// one is carried out. Nothing here waits. Guarded by the communicator's mutex.
class Pipeline {
 public:
  Pipeline(const World& world, const Arena& arena, const Limits& limits)
      : world_(world),
        limits_(limits),
        finished_(world),
        announcer_(world, arena, limits_, finished_),
        mover_(world),
        started_(finished_.own()) {}
  Pipeline(const Pipeline&) = delete;

  /// The next collective's number; throws Error when there are none left.
  uint64_t next_sequence();
  /// Collectives, over the life of the group.
  uint64_t started() const { return started_; }

  void push(OperationPtr operation) { queue_.push_back(std::move(operation)); }
  /// Takes it out, unless it is over. Allocates nothing.
  void remove(const Operation& operation);
  bool is_empty() const { return queue_.empty(); }
  /// Whether there is one whose caller need not be waiting for it, and so hear of its failure.
  bool has_background() const;
  /// The number of the first in the queue; 0 if it is empty.
  uint64_t at_hand() const { return queue_.empty() ? 0 : queue_.front()->sequence; }

  /// Does what can be done now, up to the end of the first operation. True if that has ended; else adds to `blocked_on`
  /// the ranks that must act next.
  bool step(uint64_t& blocked_on) {
    while (announced_ < queue_.size() && announce(*queue_[announced_], announced_ == 0, blocked_on)) ++announced_;
    if (announced_ == 0) return false;
    Operation& first = *queue_.front();
    if (!arrive(first, blocked_on) || !mover_.move(first, blocked_on)) return false;
    finish(first);
    queue_.pop_front();
    --announced_;
    return true;
  }
  void fail_all(const std::string& why);

  Announcer& announcer() { return announcer_; }
  Mover& mover() { return mover_; }

 private:
  bool announce(Operation& operation, bool head, uint64_t& blocked_on) {
    const uint64_t sequence = operation.sequence;
    if (sequence > kRingLines && !finished_.everyone(sequence - kRingLines, blocked_on)) return false;
    if (!head && operation.transfer.gives(world_.rank()) && reads_pending_output(operation)) return false;
    if (!announcer_.announce(operation, blocked_on)) return false;
    // While the others are on their way, this takes none of their time. (Earlier operations may use the same memory,
    // and uneven splits may not agree.)
    if (head && operation.request.kind != OperationKind::kAllToAllUneven) {
      operation.transfer.keep_own();
      operation.stage = Operation::Stage::kKept;
    }
    return true;
  }
  bool reads_pending_output(const Operation& operation) const;
  bool arrive(Operation& operation, uint64_t& blocked_on);
  void choose_method(Operation& operation);
  bool splits_agree(const Operation& operation, uint64_t& blocked_on);
  void finish(Operation& operation);

  const World& world_;
  const Limits limits_;
  FinishedCounts finished_;
  Announcer announcer_;
  Mover mover_;
  std::deque<OperationPtr> queue_;  ///< not over; the first announced_ of them are announced
  size_t announced_ = 0;
  size_t last_inline_bytes_ = 0;  ///< what the line of the operation before had
  uint64_t started_;
};

}  // namespace lockstep::shm
