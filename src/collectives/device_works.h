#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <string>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/watching_thread.h"

namespace lockstep {

/// Operations on a device that this rank's host does not wait for (order_after()). A thread watches them, because a
/// host that waits for the device, in item() or a copy, cannot. One that fails, or does not end in time, holds up the
/// device, so nothing has read its result yet; the next call of the group throws the failure. If there is none for a
/// while, the process ends with it.
class DeviceWorks {
 public:
  /// How long a failure waits for a call that can throw it.
  static constexpr std::chrono::milliseconds kGrace{2000};

  DeviceWorks() = default;
  ~DeviceWorks() { thread_.stop(); }
  DeviceWorks(const DeviceWorks&) = delete;
  DeviceWorks& operator=(const DeviceWorks&) = delete;

  /// `describe` completes the message of a failure whose cause it is given. Throws nothing.
  struct One {
    c10::intrusive_ptr<c10d::Work> work;
    Clock::time_point deadline;
    std::function<std::string(const std::string& cause)> describe;
  };
  void add(One one);
  bool has_failed() const { return has_failed_.load(std::memory_order_relaxed); }
  /// The failure, which the caller throws; empty: none.
  std::string take_failure();
  /// Waits until all are over, or `deadline`. Returns what is wrong; empty: nothing.
  std::string finish(const Deadline& deadline);
  /// Called before the device's engine is aborted, by a thread that throws why.
  void forget();

 private:
  /// Removes those that are over.
  void look() LOCKSTEP_REQUIRES(mutex_);
  void end_process_if_late() LOCKSTEP_REQUIRES(mutex_);

  std::atomic<bool> has_failed_{false};
  Mutex mutex_;
  std::deque<One> running_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string failure_ LOCKSTEP_GUARDED_BY(mutex_);
  Clock::time_point failed_at_ LOCKSTEP_GUARDED_BY(mutex_){};
  bool is_told_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  WatchingThread thread_;  // last: it uses the others
};

}  // namespace lockstep
