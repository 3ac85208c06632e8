#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <thread>
#include <utility>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "base/clock.h"
#include "base/library_thread.h"
#include "base/mutex.h"

namespace lockstep {

/// Waits for a message in its own thread, for engines where only a wait can tell whether it is done.
class MessageWaiter {
 public:
  explicit MessageWaiter(c10::intrusive_ptr<c10d::Work> work)
      : work_(std::move(work)), thread_(library_thread([this] { run(); })) {}
  ~MessageWaiter() {
    work_->abort();  // no effect if it is done
    thread_.join();
  }
  MessageWaiter(const MessageWaiter&) = delete;

  bool is_done() {
    const MutexLock lock(mutex_);
    return is_done_;
  }
  /// Behaves as the message's own wait. 0: no timeout.
  bool wait(std::chrono::milliseconds timeout) {
    const Deadline deadline(timeout);
    MutexLock lock(mutex_);
    while (!is_done_) {
      if (timeout.count() != 0 && deadline.passed()) return false;
      changed_.wait_for(lock.native(), kPause);
    }
    if (error_) std::rethrow_exception(error_);
    return is_there_;
  }

 private:
  static constexpr std::chrono::milliseconds kPause{400};  ///< an upper bound for a wait without a notification

  void run() {
    bool is_there = false;
    std::exception_ptr error;
    try {
      is_there = work_->wait();
    } catch (...) {
      error = std::current_exception();
    }
    const MutexLock lock(mutex_);
    is_there_ = is_there;
    error_ = error;
    is_done_ = true;
    changed_.notify_all();
  }

  const c10::intrusive_ptr<c10d::Work> work_;
  Mutex mutex_;
  std::condition_variable changed_;
  bool is_done_ LOCKSTEP_GUARDED_BY(mutex_) = false, is_there_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::exception_ptr error_ LOCKSTEP_GUARDED_BY(mutex_);
  std::thread thread_;  // last: it uses all the others
};

}  // namespace lockstep
