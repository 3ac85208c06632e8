#pragma once

#include <string>

#include "base/clock.h"
#include "collectives/shm/protocol/request.h"

namespace lockstep {

/// An optional engine interface besides c10d's: operations that are complete when the call returns. They allocate no
/// Work and no tensor, which together cost more than a small operation itself (3.7 us through c10d, measured with 4
/// bytes on 2 ranks in shared memory).
class BlockingEngine {
 public:
  /// `compares_all_calls`: every operation begins with a comparison of all ranks' calls, so that it ends on no rank
  /// before all have called it.
  explicit BlockingEngine(bool compares_all_calls) : compares_all_calls_(compares_all_calls) {}
  virtual ~BlockingEngine() = default;
  /// Runs an operation on contiguous CPU memory, in order with the group's other operations. Throws what a Work's wait
  /// would throw. Data that is only moved is passed as bytes, as through c10d, so ranks may mix the two ways.
  virtual void run(shm::Request&& request) = 0;
  bool compares_all_calls() const { return compares_all_calls_; }

 private:
  const bool compares_all_calls_;
};

/// An optional engine interface: any thread can end the waits of this rank.
class Interruptible {
 public:
  virtual ~Interruptible() = default;
  /// Ends the group: this rank's present and later waits in it fail with `why`. In shared memory the group ends for all
  /// ranks.
  virtual void interrupt(const std::string& why) = 0;
};

/// An optional engine interface: collectives continue although no thread waits for them.
class FinishesPending {
 public:
  virtual ~FinishesPending() = default;
  /// Called before this rank leaves the group. Waits until its collectives are done, one of them has failed, or
  /// `deadline`. Returns what is wrong with the first that is not done; empty: all are. Afterwards the engine can be
  /// released without another wait.
  virtual std::string finish(const Deadline& deadline) = 0;
};

/// An optional engine interface: a rank that leaves its groups can leave a message for the others.
class LeavesWord {
 public:
  virtual ~LeavesWord() = default;
  /// Records that this rank makes no more calls. Ranks that make more calls get that as the reason, not a broken
  /// connection.
  virtual void leave_word() = 0;
};

}  // namespace lockstep
