#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// What the launcher sees of a rank from outside, and what the rank says of itself.
struct RankView {
  RankAccount account;
  bool ended = false;
  bool outlived = false;   ///< it has ended, and something that it started lives, which may be the rank itself
  char process_state = 0;  ///< as in /proc/<pid>/stat: 'T' is stopped; 0: not looked at
  /// What its processes have used so far (processor_times()); empty: not looked at, or not to be seen.
  std::optional<Clock::duration> processor_time;
};

bool is_stopped(const RankView& rank);
/// It has joined, and others may need it.
bool takes_part(const RankView& rank);
/// It waits in a collective, or has one under way.
bool waits(const RankView& rank);
/// It lives, and is in no wait for a collective: if it computes, it may come to where others wait for it.
bool may_be_awaited(const RankView& rank);

/// Ranks that cannot go on.
struct Stall {
  enum class Kind { kStays, kComputes, kStopped, kAllWait };
  Kind kind = Kind::kStays;        ///< what holds up the others: the culprit does not come, ...
  int culprit = -1;                ///< the rank that the others need
  std::string what;                ///< "rank 2 is STOPPED", "rank 1 does not come to all_reduce #12"
  std::vector<std::string> lines;  ///< what every rank is at, at most kLines of them
  static constexpr size_t kLines = 16;
};

/// Who waits for whom, of ranks that have made no progress for a while. Empty where that is no sign of trouble: nobody
/// waits in a collective, and no process is stopped.
/// `computing`: by rank, who uses its processor; empty: nobody.
std::optional<Stall> diagnose(const std::vector<RankView>& ranks, const std::vector<bool>& computing = {});

/// How far each rank has come, for comparison with a later look. Empty where the ranks do not use their pages.
std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks);

}  // namespace lockstep
