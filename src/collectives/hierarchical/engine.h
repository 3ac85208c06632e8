#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <string>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/shared_segment.h"
#include "collectives/gloo/flight_recorder.h"
#include "collectives/hierarchical/carrier.h"
#include "collectives/hierarchical/operation.h"
#include "collectives/hierarchical/runner.h"
#include "collectives/message_watch.h"
#include "collectives/shm/backend/make_backend.h"

// Every operation becomes a Job of the group's Runner. As with Gloo, ranks compare their calls through the store
// (FlightRecorder) only when an operation makes no progress; within a machine they compare at every meeting, at no
// cost. When an operation fails on a rank, the rank ends the group for its machine and closes its connections, so that
// all others fail at once instead of waiting. Then the ranks tell each other their positions.

namespace lockstep::hierarchical_engine {

/// The engine of a group, without c10d's interface. Kept alive by its works.
class Engine {
 public:
  Engine(const Layout& layout, c10::intrusive_ptr<shm_engine::ShmBackend> shared, std::shared_ptr<Carrier> between,
         const c10::intrusive_ptr<c10d::Store>& store, std::chrono::milliseconds timeout);
  ~Engine();
  Engine(const Engine&) = delete;

  const Layout& layout() const { return equipment_.layout; }
  shm_engine::ShmBackend* shared() const { return equipment_.machine.shared(); }
  std::chrono::milliseconds timeout() const { return timeout_; }
  Runner& runner() { return runner_; }
  MessageWatch& messages() { return *messages_; }

  /// Queues an operation. `at_once`: the caller waits for it.
  JobPtr start(shm::Request request, std::chrono::milliseconds timeout, bool at_once,
               std::function<void()> then = nullptr, std::function<void(const std::exception_ptr&)> at_end = nullptr);
  /// Throws if this thread must not communicate. A callback may, on any thread, because other threads move its
  /// messages.
  void require(const char* operation) const {
    if (progress() != nullptr && !Runner::is_calling_back()) progress()->require(operation);
  }
  /// Returns true when the job is done, false at the deadline. Ends the group and throws on an Interruption.
  bool wait_until(const JobPtr& job, const Deadline* deadline);
  /// Waits without a deadline, and rethrows the job's error.
  void wait(const JobPtr& job);
  /// Rethrows the error of a finished job.
  void rethrow_error_of(const JobPtr& job);

  /// Whether communicating threads may wait in shared memory. They may not if one thread moves the messages of all
  /// groups, because the rank that it waits for may need those messages.
  bool may_wait_in_memory() const { return progress() == nullptr || !progress()->is_up_to_this_thread(); }

  /// Waits until this rank's operations are done, one has failed, or the deadline. Returns what is wrong with the first
  /// that is not done; empty: all are.
  std::string finish(const Deadline& deadline);
  /// Tells ranks that call later operations that this rank calls no more.
  void leave_word();
  /// Called when this rank has finished its part in all operations.
  void leave();
  void abort(const std::string& why);
  /// Ends the group on every rank. Later operations fail with `why`, even if another rank's end was noticed first.
  void interrupt(const std::string& why);

 private:
  Progress* progress() const { return equipment_.links.carrier().progress(); }
  void carry_out(const shm::Request& request, std::chrono::milliseconds timeout, const gloo_engine::Entry& entry,
                 uint32_t tag);
  /// Ends the group on this rank and on ranks that wait for it. Returns an explanation.
  std::string explain(const std::string& cause, const gloo_engine::Entry& entry, bool is_late)
      LOCKSTEP_REQUIRES(mutex_);
  /// Ends the group because ranks wait for each other's messages.
  void end_stuck(const std::string& text);
  /// Called while an operation takes long, by a thread that does not run it.
  void watch();

  const unsigned generation_ = fork_generation();  ///< of the process that made the group
  Equipment equipment_;
  const std::chrono::milliseconds timeout_;

  Mutex mutex_;
  const std::shared_ptr<gloo_engine::FlightRecorder> recorder_ LOCKSTEP_PT_GUARDED_BY(mutex_);
  const gloo_engine::Entry* watched_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;  ///< of the operation that runs
  std::string mismatch_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string failure_ LOCKSTEP_GUARDED_BY(mutex_);              ///< of the first operation that failed
  std::exception_ptr interruption_ LOCKSTEP_GUARDED_BY(mutex_);  ///< of a job; not reported yet

  Mutex ended_mutex_;  ///< taken last, also by threads that may not wait for an operation
  std::string ended_because_ LOCKSTEP_GUARDED_BY(ended_mutex_);

  std::atomic<bool> is_told_{false};  ///< this rank was told of a failure, or its wait was interrupted
  const std::shared_ptr<MessageWatch> messages_;
  Runner runner_;  ///< destroyed first
};
using EnginePtr = std::shared_ptr<Engine>;

}  // namespace lockstep::hierarchical_engine
