#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace lockstep::shm {

/// How one wait spends its time: some spinning, then offering the processor to others between looks, then naps.
///
/// How long it spins is learned from wait to wait: a peer that runs on another processor answers within a fraction of
/// a microsecond, one that shares this processor never does while we spin. A wait that ended after spinning tells by
/// its offers which it was: where they were taken at once and for nothing, and it was short, more spinning would have
/// been better; where somebody else ran meanwhile, less. (Judging by the number of looks alone let two ranks slow each
/// other down for good: 2.0 us instead of 0.14 for 4 bytes.) Where the ranks do not fit on their processors nobody
/// spins at all. The clock is read now and then only.
class Patience {
 public:
  enum class Step { kSpin, kYield, kNap };
  static constexpr unsigned kFewestSpins = 8;  ///< a fraction of a microsecond
  static constexpr unsigned kMostSpins = 512;  ///< about 10 us
  static constexpr std::chrono::microseconds kYieldBudget{50};
  static constexpr std::chrono::microseconds kYieldBudgetCrowded{200};
  static constexpr std::chrono::microseconds kNap{10'000};  ///< how late a death may be noticed

  /// `learned` is the number of spins that paid so far, kept by the group.
  Patience(bool spin, unsigned& learned, std::chrono::milliseconds timeout)
      : spin_(spin),
        learned_(learned),
        timeout_(std::min<std::chrono::milliseconds>(timeout, std::chrono::hours(24 * 365))) {}

  ~Patience() { learned_ = std::clamp(spinning_pays() ? learned_ * 2 : learned_ / 2, kFewestSpins, kMostSpins); }

  Step next() {
    if (++steps_ <= learned_ && spin_) return Step::kSpin;
    if (start_ == Clock::time_point{})
      start_ = Clock::now();
    else if (!napping_ && steps_ % 4 == 0)
      napping_ = Clock::now() - start_ > (spin_ ? kYieldBudget : kYieldBudgetCrowded);
    ++offers_;
    return napping_ ? Step::kNap : Step::kYield;
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
  static constexpr std::chrono::microseconds kShortWait{10};
  static constexpr std::chrono::nanoseconds kIdleOffer{1'500};  ///< a look and an offer that nobody took

  bool spinning_pays() const {
    if (offers_ == 0) return true;
    const auto waited = Clock::now() - start_;
    return waited < kShortWait && waited < offers_ * kIdleOffer;
  }

  const bool spin_;
  unsigned& learned_;
  const std::chrono::milliseconds timeout_;
  bool napping_ = false;
  unsigned steps_ = 0;
  unsigned offers_ = 0;  ///< of the processor, so far
  Clock::time_point start_{};
  Clock::time_point last_look_{};
};

}  // namespace lockstep::shm
