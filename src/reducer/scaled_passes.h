#pragma once

#include <set>

#include "base/mutex.h"

namespace lockstep {

/// The backward passes that went through a loss which one GradScaler has scaled. Any thread may call it.
class ScaledPasses {
 public:
  ScaledPasses();
  ~ScaledPasses();
  ScaledPasses(const ScaledPasses&) = delete;
  ScaledPasses& operator=(const ScaledPasses&) = delete;

  /// Whether there is such an object in this process, so that somebody will ask for the passes.
  static bool any();

  void add(int backward) {
    const MutexLock lock(mutex_);
    numbers_.insert(backward);
  }
  bool contains(int backward) const {
    const MutexLock lock(mutex_);
    return numbers_.contains(backward);
  }
  void clear() {
    const MutexLock lock(mutex_);
    numbers_.clear();
  }

 private:
  mutable Mutex mutex_;
  std::set<int> numbers_ LOCKSTEP_GUARDED_BY(mutex_);  ///< see current_backward()
};

}  // namespace lockstep
