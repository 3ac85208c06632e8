#pragma once

#include <atomic>

namespace lockstep {

/// The thread that is in a call of a group. A move does not carry it over: no thread calls a group that is being made.
class CurrentCaller {
 public:
  CurrentCaller() = default;
  CurrentCaller(CurrentCaller&&) noexcept {}

 private:
  friend class CallGuard;
  std::atomic<const void*> thread_{nullptr};            // an address that only that thread has
  std::atomic<const char*> operation_{"an operation"};  // of that thread
};

/// Held during a call of a group, by one thread at a time. Ranks match operations by their order, and two threads at
/// once would give each rank a different order. A call made within a call belongs to the outer one.
class CallGuard {
 public:
  /// Throws Error naming both operations if another thread is in a call, and in a child of fork(). `operation` is a
  /// literal.
  CallGuard(CurrentCaller& caller, int rank, unsigned fork_generation, const char* operation);
  ~CallGuard() {
    if (!within_) caller_.thread_.store(nullptr, std::memory_order_release);
  }
  CallGuard(const CallGuard&) = delete;

  /// The user's own call: the outermost one.
  static const char* operation(const CurrentCaller& caller) {
    return caller.operation_.load(std::memory_order_relaxed);
  }

 private:
  CurrentCaller& caller_;
  bool within_ = false;
};

}  // namespace lockstep
