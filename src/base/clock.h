#pragma once

#include <ctime>

#include <chrono>

namespace lockstep {

/// The only clock used for waits and durations: steady, never the wall clock.
using Clock = std::chrono::steady_clock;

/// A longer timeout means "never", and would overflow the clock.
inline constexpr std::chrono::milliseconds kLongestTimeout = std::chrono::hours(24 * 365);

/// The time of the last tick: at most a few milliseconds old, and ten times as cheap. For times that appear only in
/// error texts.
inline Clock::time_point coarse_now() {
  timespec time{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
  return Clock::time_point(std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec));
}

/// An instant after which a wait must end.
class Deadline {
 public:
  explicit Deadline(std::chrono::milliseconds timeout) : at_(Clock::now() + timeout) {}
  explicit Deadline(Clock::time_point at) : at_(at) {}

  bool passed() const { return Clock::now() >= at_; }

  /// Milliseconds left, rounded up, never negative, as poll() takes them.
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
