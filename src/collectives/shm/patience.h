#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace lockstep::shm {

/// How one wait spends its time: some spinning, then naps, from which whoever publishes wakes it.
///
/// A peer that runs on another processor mostly answers within microseconds. Offering the processor meanwhile is worse
/// than holding it: the call makes this rank late for the next operation, so that the other one offers its own (two
/// ranks that gave up spinning after a fraction of a microsecond slowed each other down for good: 2.0 us instead of
/// 0.13 for 4 bytes), and a stranger who takes the offer, however low its priority, keeps the processor until the next
/// tick. Only a peer that needs this very processor gets it, and at once. Where the ranks do not fit on their
/// processors it is offered soon in any case; but for less time than a change of processes takes, a peer on another
/// processor is waited for (4 ranks on 2: 2.2 us instead of 3.6 for 4 bytes). The clock is read now and then only.
class Patience {
 public:
  enum class Step { kSpin, kYield, kNap };
  static constexpr unsigned kSpins = 2048;       ///< about 50 us
  static constexpr unsigned kSpinsInCrowd = 64;  ///< about 1.5 us
  static constexpr std::chrono::microseconds kYieldBudget{200};
  static constexpr std::chrono::microseconds kNap{10'000};  ///< how late a death may be noticed

  /// `spin`: the ranks fit on their processors.
  Patience(bool spin, std::chrono::milliseconds timeout)
      : spins_(spin ? kSpins : kSpinsInCrowd),
        spins_left_(spins_),
        crowded_(!spin),
        timeout_(std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365))) {}

  /// `processor_needed`: somebody this rank waits for cannot go on while it spins.
  Step next(bool processor_needed) {
    if (spins_left_ > 0 && !processor_needed) {
      --spins_left_;
      return Step::kSpin;
    }
    if (start_ == Clock::time_point{}) start_ = Clock::now();
    if (!crowded_ && !processor_needed)
      napping_ = true;
    else if (!napping_ && ++offers_ % 4 == 0)
      napping_ = Clock::now() - start_ > kYieldBudget;
    return napping_ ? Step::kNap : Step::kYield;
  }

  /// Something came: a large operation goes in rounds, and each is waited for as long. (With the spins of one wait for
  /// all rounds, a broadcast of 64 MiB used them up and napped from there on: 8 ms instead of 2.2.)
  void renew() {
    spins_left_ = spins_;
    napping_ = napping_ && crowded_;
  }

  /// Once a nap's length, while napping: time to see whether the others still live.
  bool time_to_look() {
    const auto now = Clock::now();
    if (now - last_look_ < kNap) return false;
    last_look_ = now;
    return true;
  }

  std::chrono::microseconds left() const {
    return std::chrono::ceil<std::chrono::microseconds>(start_ + timeout_ - Clock::now());
  }
  std::chrono::milliseconds timeout() const { return timeout_; }

 private:
  const unsigned spins_;
  unsigned spins_left_;
  const bool crowded_;
  const std::chrono::milliseconds timeout_;
  bool napping_ = false;
  unsigned offers_ = 0;  ///< of the processor, so far
  Clock::time_point start_{};
  Clock::time_point last_look_{};
};

}  // namespace lockstep::shm
