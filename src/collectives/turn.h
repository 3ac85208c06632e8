#pragma once

#include <atomic>

namespace lockstep {

/// Which thread is in a call of a group. Moving it forgets: nobody calls a group that is just being made.
class Callers {
 public:
  Callers() = default;
  Callers(Callers&&) noexcept {}

 private:
  friend class Turn;
  std::atomic<const void*> thread_{nullptr};            // an address that only this thread has
  std::atomic<const char*> operation_{"an operation"};  // of that thread
};

/// One thread's turn with a group, for as long as its call lasts: operations are matched with the other ranks' by their
/// order, and two threads at once would give each rank another one. Calls within a call are part of it.
class Turn {
 public:
  /// Throws Error naming both operations while another thread is in a call, and in a child of fork(). `operation` is a
  /// literal.
  Turn(Callers& callers, int rank, unsigned fork_generation, const char* operation);
  ~Turn() {
    if (!within_) callers_.thread_.store(nullptr, std::memory_order_release);
  }
  Turn(const Turn&) = delete;

  /// What the user called: the outermost of the calls.
  static const char* operation(const Callers& callers) { return callers.operation_.load(std::memory_order_relaxed); }

 private:
  Callers& callers_;
  bool within_ = false;
};

}  // namespace lockstep
