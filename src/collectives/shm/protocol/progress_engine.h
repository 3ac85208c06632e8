#pragma once

#include <cstdint>
#include <string>

#include "collectives/shm/protocol/admission.h"
#include "collectives/shm/protocol/channels.h"
#include "collectives/shm/protocol/pipeline.h"
#include "collectives/shm/segment/arena.h"
#include "collectives/shm/segment/futex.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

/// The threads of this rank that sleep in its group.
class Sleepers {
 public:
  explicit Sleepers(const World& world) : world_(world) {}
  void enter() { ++count_; }
  void leave() { --count_; }
  bool is_empty() const { return count_ == 0; }
  /// Another thread of this rank may be sleeping for what this thread has finished.
  void wake() const {
    if (count_ == 0) return;
    world_.mine().bell.fetch_add(1);
    futex_wake_all(world_.mine().bell);
  }

 private:
  const World& world_;
  int count_ = 0;
};

/// Makes progress with what one rank has started in its group, collectives and messages, until a verdict ends the
/// group. It never waits. Guarded by the communicator's mutex.
class ProgressEngine {
 public:
  ProgressEngine(const World& world, const Arena& arena, const Limits& limits, const Admission& admission)
      : world_(world), admission_(admission), pipeline_(world, arena, limits), channels_(world), sleepers_(world) {}

  Pipeline& pipeline() { return pipeline_; }
  Channels& channels() { return channels_; }
  Sleepers& sleepers() { return sleepers_; }

  /// Does what can be done now. True if something is still pending.
  bool advance();
  /// Nothing is pending.
  bool is_idle() const { return pipeline_.is_empty() && channels_.pending() == 0; }
  /// The ranks that the last advance() was blocked on, as bits: each of them must act, ...
  uint64_t blocked_on() const { return blocked_on_; }
  /// ... or any one of these, ...
  uint64_t blocked_on_any() const { return blocked_on_any_; }
  /// ... and all of both.
  uint64_t waits_for() const { return blocked_on_ | blocked_on_any_; }

  /// Whether there is a verdict; if so, fails everything pending with its text.
  bool is_over();
  /// Ends the group on every rank, unless it is over or this rank has left it.
  void abort(const std::string& why);
  /// Does the same for an operation that has thrown, and removes it from the queue.
  void abort_operation(const Operation& operation, const char* why);
  /// Why collectives that this rank may not have waited for have failed with the group; empty: none has.
  const std::string& failure() const { return failure_; }
  /// This rank leaves the group: what is pending fails, here and on the ranks that still need this one.
  void leave();

 private:
  void fail_all(const std::string& why);

  const World& world_;
  const Admission& admission_;
  Pipeline pipeline_;
  Channels channels_;
  Sleepers sleepers_;
  uint64_t blocked_on_ = 0;
  uint64_t blocked_on_any_ = 0;
  std::string verdict_text_;
  std::string failure_;
};

}  // namespace lockstep::shm
