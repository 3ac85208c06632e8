#pragma once

#include <condition_variable>
#include <mutex>

#include "base/thread_annotations.h"

namespace lockstep {

/// A std::mutex that the thread-safety analysis understands.
class LOCKSTEP_CAPABILITY("mutex") Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  void lock() LOCKSTEP_ACQUIRE() { mutex_.lock(); }
  void unlock() LOCKSTEP_RELEASE() { mutex_.unlock(); }
  bool try_lock() LOCKSTEP_TRY_ACQUIRE(true) { return mutex_.try_lock(); }

 private:
  friend class MutexLock;
  std::mutex mutex_;
};

/// Holds a Mutex for its lifetime. It may be unlocked and locked again in between.
class LOCKSTEP_SCOPED_CAPABILITY MutexLock {
 public:
  explicit MutexLock(Mutex& mutex) LOCKSTEP_ACQUIRE(mutex) : lock_(mutex.mutex_) {}
  ~MutexLock() LOCKSTEP_RELEASE() = default;
  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

  void lock() LOCKSTEP_ACQUIRE() { lock_.lock(); }
  void unlock() LOCKSTEP_RELEASE() { lock_.unlock(); }

  /// The held mutex, for a condition variable: `changed.wait(lock.native())`. Wait in a loop, because the analysis
  /// treats a predicate as a function that holds nothing.
  std::unique_lock<std::mutex>& native() { return lock_; }

 private:
  std::unique_lock<std::mutex> lock_;
};

}  // namespace lockstep
