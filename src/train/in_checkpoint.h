#pragma once

#include <utility>

namespace lockstep {

/// While one lives, the thread runs a function that was given to checkpoint().
class InCheckpoint {
 public:
  InCheckpoint() = default;
  ~InCheckpoint() { here_ = before_; }
  InCheckpoint(const InCheckpoint&) = delete;
  InCheckpoint& operator=(const InCheckpoint&) = delete;

  static bool here() { return here_; }

 private:
  inline static thread_local bool here_ = false;
  const bool before_ = std::exchange(here_, true);
};

}  // namespace lockstep
