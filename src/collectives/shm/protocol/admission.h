#pragma once

#include <atomic>

#include "base/error.h"
#include "base/shared_segment.h"

namespace lockstep::shm {

/// Whether a group may be used: by the process that made it, until this rank has left it. From any thread.
class Admission {
 public:
  /// Not a child of fork().
  bool is_own_process() const { return fork_generation_ == fork_generation(); }
  void check_process() const {
    if (!is_own_process())
      throw Error(
          "this group belongs to the process that made it, not to a child it forked; make another group in the child");
  }
  void check_member() const {
    check_process();
    if (has_left()) throw Error("this rank has left the group; make a new one");
  }

  bool has_left() const { return left_.load(std::memory_order_relaxed); }
  /// False if it had left before.
  bool leave() { return !left_.exchange(true); }

 private:
  const unsigned fork_generation_ = fork_generation();
  std::atomic<bool> left_{false};
};

}  // namespace lockstep::shm
