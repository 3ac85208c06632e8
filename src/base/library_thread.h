#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <set>
#include <thread>

namespace lockstep {

/// Starts a thread of this library, which calls no group on its own account; see another_thread_may_act().
std::thread library_thread(std::function<void()> body);

/// Counts the threads that start during its lifetime among this library's: those of an engine or a store.
class AdoptsNewThreads {
 public:
  AdoptsNewThreads();
  ~AdoptsNewThreads();
  AdoptsNewThreads(const AdoptsNewThreads&) = delete;
  AdoptsNewThreads& operator=(const AdoptsNewThreads&) = delete;

 private:
  const std::set<pid_t> before_;
};

/// Whether a thread of this process, other than `caller` (thread_number()) and this library's, may continue without
/// being woken by another thread of the process. Such a thread computes, sleeps for a limited time, or waits for
/// something outside the process, and may call a group next. True if the kernel does not tell (/proc/self/task).
bool another_thread_may_act(uint64_t caller);

}  // namespace lockstep
