#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/rank_page.h"

namespace lockstep {

/// What the launcher sees of a rank from outside, and what the rank says of itself.
struct RankView {
  RankAccount account;
  bool ended = false;
  bool outlived = false;   ///< it has ended, and something that it started lives, which may be the rank itself
  char process_state = 0;  ///< as in /proc/<pid>/stat: 'T' is stopped; 0: not looked at
};

/// Ranks that cannot go on.
struct Stall {
  int culprit = -1;                ///< the rank that the others need
  std::string what;                ///< "rank 2 is STOPPED", "rank 1 does not come to all_reduce #12"
  std::vector<std::string> lines;  ///< what every rank is at, at most kLines of them
  static constexpr size_t kLines = 16;
};

/// Who waits for whom, of ranks that have made no progress for a while. Empty where that is no sign of trouble: nobody
/// waits in a collective, and no process is stopped.
std::optional<Stall> diagnose(const std::vector<RankView>& ranks);

/// How far each rank has come, for comparison with a later look. Empty where the ranks do not use their pages.
std::vector<uint64_t> progress_of(const std::vector<RankView>& ranks);

/// The state of a process as in /proc/<pid>/stat; 0 where there is none to be seen.
char process_state(pid_t pid);

/// Whether a process group has a member that is no zombie. Looks at every process of the machine.
bool group_lives(pid_t group);

}  // namespace lockstep
