#pragma once

#include <algorithm>
#include <chrono>

#include "base/clock.h"

namespace lockstep::shm {

/// How one wait spends its time: some spinning, then offering the processor to others between looks, then naps.
///
/// How long it spins is learned from wait to wait: a peer that runs on another processor answers within a fraction of
/// a microsecond, one that shares this processor never does while we spin. Where the ranks do not fit on their
/// processors nobody spins at all. The clock is read now and then only.
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

  ~Patience() {
    const bool paid = steps_ <= learned_;
    learned_ = std::clamp(paid ? learned_ * 2 : learned_ / 2, kFewestSpins, kMostSpins);
  }

  Step next() {
    if (++steps_ <= learned_ && spin_) return Step::kSpin;
    if (!napping_ && steps_ % 4 == 0) {
      const auto now = Clock::now();
      if (start_ == Clock::time_point{}) start_ = now;
      napping_ = now - start_ > (spin_ ? kYieldBudget : kYieldBudgetCrowded);
    }
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
  const bool spin_;
  unsigned& learned_;
  const std::chrono::milliseconds timeout_;
  bool napping_ = false;
  unsigned steps_ = 0;
  Clock::time_point start_{};
  Clock::time_point last_look_{};
};

}  // namespace lockstep::shm
