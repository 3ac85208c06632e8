#pragma once

#include "base/clock.h"

namespace lockstep::hierarchical_engine {

/// Drives messages that do not progress by themselves.
class Progress {
 public:
  virtual ~Progress() = default;
  /// Whether only this thread may move messages, so that others wait for it.
  virtual bool is_up_to_this_thread() const = 0;
  /// Throws Error, naming the operation, on a thread that must not start or await one.
  virtual void require(const char* operation) const = 0;
  /// Moves messages, if this thread may. Returns whether any moved.
  virtual bool poll() = 0;
  /// poll() for a thread that has been waiting since `since`: rests for a moment if nothing moved.
  virtual void make(Clock::time_point since) = 0;
};

}  // namespace lockstep::hierarchical_engine
