#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace lockstep::shm {

/// How a wait spends its time: first it spins, then it sleeps in short intervals, from which a rank that publishes
/// wakes it.
///
/// A peer on another processor usually answers within microseconds. Yielding the processor meanwhile is worse than
/// holding it. The call makes this rank late for the next operation, so the other one yields too: two ranks that
/// stopped spinning after a fraction of a microsecond slowed each other down for good (4 bytes in 2.0 us instead of
/// 0.13). And another process that gets the processor, however low its priority, keeps it until the next tick. So the
/// processor is yielded at once to a peer that needs this very processor, and to nobody else. Where there are more
/// ranks than processors it is yielded soon in any case, after spinning for less time than a context switch takes (4
/// ranks on 2: 2.2 us instead of 3.6 for 4 bytes). The clock is read only now and then.
class WaitPolicy {
 public:
  enum class Step { kSpin, kYield, kSleep };
  static constexpr unsigned kSpins = 2048;       ///< about 50 us
  static constexpr unsigned kSpinsInCrowd = 64;  ///< about 1.5 us
  static constexpr std::chrono::microseconds kYieldBudget{200};
  static constexpr std::chrono::microseconds kLongestSleep{10'000};  ///< also how late a death may be noticed

  /// `spin`: the ranks fit on their processors. `since`: when the wait began; else it begins with the first next().
  WaitPolicy(bool spin, std::chrono::milliseconds timeout, Clock::time_point since = {})
      : spins_(spin ? kSpins : kSpinsInCrowd),
        spins_left_(spins_),
        crowded_(!spin),
        timeout_(std::min(timeout, kLongestTimeout)),
        start_(since) {}

  /// `processor_needed`: a rank that this one waits for cannot run while this one spins.
  Step next(bool processor_needed) {
    if (spins_left_ > 0 && !processor_needed) {
      --spins_left_;
      return Step::kSpin;
    }
    if (start_ == Clock::time_point{}) start_ = Clock::now();
    if (!crowded_ && !processor_needed)
      sleeping_ = true;
    else if (!sleeping_ && ++offers_ % 4 == 0)
      sleeping_ = Clock::now() - start_ > kYieldBudget;
    return sleeping_ ? Step::kSleep : Step::kYield;
  }

  /// Something has arrived: a large operation goes in rounds, and each round gets the full spinning time, as does each
  /// part of a message. (When all rounds shared it, a broadcast of 64 MiB used it up and slept from there on: 8 ms
  /// instead of 2.2.)
  void reset() {
    spins_left_ = spins_;
    sleeping_ = sleeping_ && crowded_;
  }

  /// While sleeping, true once in kLongestSleep: time to see whether the others are still alive.
  bool should_check_peers() {
    const auto now = Clock::now();
    if (now - last_check_ < kLongestSleep) return false;
    last_check_ = now;
    return true;
  }

  std::chrono::microseconds remaining() const {
    return std::chrono::ceil<std::chrono::microseconds>(start_ + timeout_ - Clock::now());
  }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const unsigned spins_;
  unsigned spins_left_;
  const bool crowded_;
  const std::chrono::milliseconds timeout_;
  bool sleeping_ = false;
  unsigned offers_ = 0;  ///< to yield, so far
  Clock::time_point start_;
  Clock::time_point last_check_{};
};

}  // namespace lockstep::shm
