#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "collectives/told_wait.h"

namespace lockstep {

/// Detects ranks that wait for each other's messages, from their announcements. They must be seen in the same waits for
/// kSameFor.
class MessageDeadlock {
 public:
  static constexpr std::chrono::milliseconds kSameFor{900};

  explicit MessageDeadlock(int rank) : rank_(rank) {}
  /// `told` is by rank. Returns which rank waits for which if `rank` is among them; empty if there is no deadlock, or
  /// it has not lasted long enough.
  std::string judge(const std::vector<ToldWait>& told);

 private:
  const int rank_;
  std::vector<uint64_t> stuck_;  ///< serials of the ranks that were stuck at the last look; 0: not stuck
  Clock::time_point stuck_since_;
};

}  // namespace lockstep
