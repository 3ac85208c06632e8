#pragma once

#include <chrono>
#include <condition_variable>
#include <functional>
#include <thread>

#include "base/mutex.h"
#include "base/shared_segment.h"

namespace lockstep {

/// A thread that checks something repeatedly until it is stopped. A forked child has no such thread, and stops nothing.
class WatchingThread {
 public:
  WatchingThread() = default;
  ~WatchingThread() { stop(); }
  WatchingThread(const WatchingThread&) = delete;
  WatchingThread& operator=(const WatchingThread&) = delete;

  /// Calls `look` after each `pause`, until it returns false or throws, when it has nothing more to tell.
  /// REQUIRES: the thread has not been started.
  void start(std::chrono::milliseconds pause, std::function<bool()> look);
  /// Returns when `look` is over. Called on the thread that called start(), or on one that follows it.
  void stop();
  /// Whether it was started by this process, not by the process that forked it.
  bool is_ours() const { return thread_.joinable() && generation_ == fork_generation(); }

 private:
  void run(std::chrono::milliseconds pause, const std::function<bool()>& look);

  unsigned generation_ = 0;
  Mutex mutex_;
  std::condition_variable wakes_;
  bool stops_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses the others
};

}  // namespace lockstep
