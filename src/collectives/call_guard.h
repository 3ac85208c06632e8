#pragma once

#include <atomic>

#include "base/shared_segment.h"
#include "base/thread_token.h"

namespace lockstep {

/// The thread that is in a call of a group. Moving does not carry it over, because no thread calls a group that is
/// being made.
class CurrentCaller {
 public:
  CurrentCaller() = default;
  CurrentCaller(CurrentCaller&&) noexcept {}

 private:
  friend class CallGuard;
  std::atomic<const void*> thread_{nullptr};            // an address unique to that thread
  std::atomic<const char*> operation_{"an operation"};  // of that thread
};

/// Held during a call of a group, by one thread at a time. Ranks match operations by their order, and two concurrent
/// threads would give each rank a different order. A call made within a call belongs to the outer one.
class CallGuard {
 public:
  /// Throws Error naming both operations if another thread is in a call, and in a child of fork(). `operation` is a
  /// literal.
  CallGuard(CurrentCaller& caller, int rank, unsigned fork_generation, const char* operation) : caller_(caller) {
    if (fork_generation != lockstep::fork_generation()) refuse_child(operation);
    const void* const here = thread_token();
    const void* other = nullptr;
    if (caller.thread_.compare_exchange_strong(other, here, std::memory_order_acquire))
      caller.operation_.store(operation, std::memory_order_relaxed);
    else if (other == here)
      within_ = true;
    else
      refuse(rank, operation);
  }
  ~CallGuard() {
    if (!within_) caller_.thread_.store(nullptr, std::memory_order_release);
  }
  CallGuard(const CallGuard&) = delete;

  /// The user's own call: the outermost one.
  static const char* operation(const CurrentCaller& caller) {
    return caller.operation_.load(std::memory_order_relaxed);
  }

 private:
  [[noreturn]] static void refuse_child(const char* operation);
  [[noreturn]] void refuse(int rank, const char* operation) const;

  CurrentCaller& caller_;
  bool within_ = false;
};

}  // namespace lockstep
