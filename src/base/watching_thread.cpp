#include "base/watching_thread.h"

#include "base/clock.h"
#include "base/library_thread.h"

namespace lockstep {

void WatchingThread::start(std::chrono::milliseconds pause, std::function<bool()> look) {
  generation_ = fork_generation();
  thread_ = library_thread([this, pause, look = std::move(look)] { run(pause, look); });
}

void WatchingThread::stop() {
  if (!thread_.joinable()) return;
  if (generation_ != fork_generation()) return thread_.detach();
  {
    const MutexLock lock(mutex_);
    stops_ = true;
  }
  wakes_.notify_all();
  thread_.join();
}

void WatchingThread::run(std::chrono::milliseconds pause, const std::function<bool()>& look) {
  while (true) {
    {
      MutexLock lock(mutex_);
      for (const Deadline deadline(pause); !stops_ && !deadline.passed();)
        wakes_.wait_for(lock.native(), std::chrono::milliseconds(deadline.remaining_ms()));
      if (stops_) return;
    }
    try {
      if (!look()) return;
    } catch (...) {  // leaving a thread, it would end the process
      return;
    }
  }
}

}  // namespace lockstep
