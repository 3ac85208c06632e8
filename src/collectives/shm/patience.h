#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace lockstep::shm {

/// How one wait spends its time: a moment of spinning, then naps, until its time is up.
///
/// Where the ranks do not fit on their processors nobody spins: the processor is offered to others at once, and the
/// wait sleeps after a moment of that. The clock is read now and then only.
class Patience {
 public:
  enum class Step { kSpin, kYield, kNap };
  static constexpr std::chrono::microseconds kSpinBudget{50};
  static constexpr std::chrono::microseconds kYieldBudget{200};
  static constexpr std::chrono::microseconds kNap{10'000};  ///< how late a death may be noticed

  Patience(bool spin, std::chrono::milliseconds timeout)
      : spin_(spin), timeout_(std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365))) {}

  Step next() {
    const bool look = spin_ ? ++count_ % 32 == 0 : ++count_ % 4 == 0;
    if (!napping_ && look) {
      const auto now = Clock::now();
      if (start_ == Clock::time_point{}) start_ = now;
      napping_ = now - start_ > (spin_ ? kSpinBudget : kYieldBudget);
    }
    return napping_ ? Step::kNap : spin_ ? Step::kSpin : Step::kYield;
  }

  /// Now and then, while spinning: time to look after other things.
  bool look_around() const { return count_ % 16 == 0; }

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
  const bool spin_;
  const std::chrono::milliseconds timeout_;
  bool napping_ = false;
  unsigned count_ = 0;
  Clock::time_point start_{};
  Clock::time_point last_look_{};
};

}  // namespace lockstep::shm
