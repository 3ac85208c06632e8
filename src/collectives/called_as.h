#pragma once

#include "collectives/shm/request.h"

namespace lockstep {

/// What this thread's operations are part of, for the shared-memory engine's messages to name.
inline thread_local shm::CalledAs called_as = shm::CalledAs::kItself;

/// Says it for a scope; the outermost counts.
class NamedCall {
 public:
  explicit NamedCall(shm::CalledAs name) : before_(called_as) {
    if (before_ == shm::CalledAs::kItself) called_as = name;
  }
  ~NamedCall() { called_as = before_; }
  NamedCall(const NamedCall&) = delete;

 private:
  const shm::CalledAs before_;
};

}  // namespace lockstep
