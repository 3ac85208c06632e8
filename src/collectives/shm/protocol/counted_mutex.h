#pragma once

#include <atomic>
#include <mutex>

#include "base/thread_annotations.h"

namespace lockstep::shm {

/// A mutex that counts the threads that wait for it, so that none of them spins while it holds the mutex.
class LOCKSTEP_CAPABILITY("mutex") CountedMutex {
 public:
  CountedMutex() = default;
  CountedMutex(const CountedMutex&) = delete;
  CountedMutex& operator=(const CountedMutex&) = delete;

  void lock() LOCKSTEP_ACQUIRE() {
    if (mutex_.try_lock()) return;
    waiters_.fetch_add(1, std::memory_order_relaxed);
    mutex_.lock();
    waiters_.fetch_sub(1, std::memory_order_relaxed);
  }
  /// For a thread that has let the mutex go to yield or to sleep: it is not counted.
  void lock_again() LOCKSTEP_ACQUIRE() { mutex_.lock(); }
  bool try_lock() LOCKSTEP_TRY_ACQUIRE(true) { return mutex_.try_lock(); }
  void unlock() LOCKSTEP_RELEASE() { mutex_.unlock(); }

  bool is_waited_for() const { return waiters_.load(std::memory_order_relaxed) != 0; }

 private:
  std::atomic<int> waiters_{0};
  std::mutex mutex_;
};

/// Holds a CountedMutex until it goes, or until unlock().
class LOCKSTEP_SCOPED_CAPABILITY CountedLock {
 public:
  explicit CountedLock(CountedMutex& mutex) LOCKSTEP_ACQUIRE(mutex) : mutex_(mutex) { mutex.lock(); }
  /// Takes over a mutex that is held.
  CountedLock(CountedMutex& mutex, std::adopt_lock_t /*held*/) LOCKSTEP_REQUIRES(mutex) : mutex_(mutex) {}
  ~CountedLock() LOCKSTEP_RELEASE() {
    if (held_) mutex_.unlock();
  }
  CountedLock(const CountedLock&) = delete;
  CountedLock& operator=(const CountedLock&) = delete;

  void unlock() LOCKSTEP_RELEASE() {
    held_ = false;
    mutex_.unlock();
  }

 private:
  CountedMutex& mutex_;
  bool held_ = true;
};

}  // namespace lockstep::shm
