#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/told_wait.h"

namespace lockstep {

/// Finds out whether ranks wait for each other's messages, from what each has told of its wait. Ranks must be seen in
/// the same waits for kSameFor.
class MessageDeadlock {
 public:
  static constexpr std::chrono::milliseconds kSameFor{900};

  explicit MessageDeadlock(int rank) : rank_(rank) {}
  /// `told`: by rank. Returns who waits for whom if `rank` is one of them; empty: nobody, or not for long enough yet.
  std::string judge(const std::vector<ToldWait>& told);

 private:
  const int rank_;
  std::vector<uint64_t> stuck_;  ///< serials of the ranks that were stuck at the last look; 0: not stuck
  Clock::time_point stuck_since_;
};

}  // namespace lockstep
