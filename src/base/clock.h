#pragma once

#include <chrono>

namespace lockstep {

/// The only clock used for waits and durations: steady, never the wall clock.
using Clock = std::chrono::steady_clock;

/// An instant after which a wait must end.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout) : at_(Clock::now() + timeout) {}

  bool passed() const { return Clock::now() >= at_; }

  /// Milliseconds left, rounded up, never negative: what poll() takes.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(at_ - Clock::now()).count();
    return left > 0 ? static_cast<int>(left) : 0;
  }

 private:
  Clock::time_point at_;
};

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

}  // namespace lockstep
