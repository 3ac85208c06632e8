#include "collectives/mpi/mover.h"

#include <chrono>
#include <utility>

#include "base/library_thread.h"

namespace lockstep::mpi_engine {
namespace {

/// Time between two polls. It matters only if no waiting thread polls more often.
constexpr std::chrono::milliseconds kPause{1};

}  // namespace

Mover::Mover(std::function<bool()> poll) : poll_(std::move(poll)) {
  thread_ = library_thread([this] { run(); });
}

void Mover::end() {
  if (!thread_.joinable()) return;
  if (fork_generation_ != fork_generation()) return thread_.detach();
  {
    const MutexLock lock(mutex_);
    ending_ = true;
  }
  changed_.notify_one();
  thread_.join();
}

void Mover::wake() {
  {
    const MutexLock lock(mutex_);
    awake_ = true;
  }
  changed_.notify_one();
}

void Mover::run() {
  MutexLock lock(mutex_);
  while (!ending_) {
    if (!awake_) {
      changed_.wait(lock.native());
      continue;
    }
    changed_.wait_for(lock.native(), kPause);
    awake_ = false;  // a wake() during the poll counts
    lock.unlock();
    const bool moving = poll_();
    lock.lock();
    awake_ = awake_ || moving;
  }
}

}  // namespace lockstep::mpi_engine
