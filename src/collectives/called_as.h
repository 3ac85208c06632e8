#pragma once

#include "collectives/shm/protocol/request.h"

namespace lockstep {

/// The user's call to which this thread's operations belong. The engines' messages name it.
inline thread_local shm::CalledAs called_as = shm::CalledAs::kItself;

/// Sets it for a scope; the outermost guard counts.
class CalledAsGuard {
 public:
  explicit CalledAsGuard(shm::CalledAs name) : before_(called_as) {
    if (before_ == shm::CalledAs::kItself) called_as = name;
  }
  ~CalledAsGuard() { called_as = before_; }
  CalledAsGuard(const CalledAsGuard&) = delete;

 private:
  const shm::CalledAs before_;
};

}  // namespace lockstep
