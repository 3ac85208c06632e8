#pragma once

#include <condition_variable>
#include <functional>
#include <thread>

#include "base/mutex.h"
#include "base/shared_segment.h"

namespace lockstep::mpi_engine {

/// A thread that polls from time to time while messages move, because the threads that wait for them may sleep.
class Mover {
 public:
  /// `poll` returns whether messages are still moving.
  explicit Mover(std::function<bool()> poll);
  ~Mover() { end(); }
  Mover(const Mover&) = delete;
  Mover& operator=(const Mover&) = delete;

  /// Tells that a message begins to move. Any thread may call.
  void wake();
  /// Ends the thread. In a forked process, which does not have the thread, discards it.
  void end();

 private:
  void run();

  const std::function<bool()> poll_;
  const unsigned fork_generation_ = fork_generation();
  Mutex mutex_;
  std::condition_variable changed_;  ///< one of the following
  bool awake_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool ending_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace lockstep::mpi_engine
