#pragma once

#include <sys/types.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/rank_names.h"
#include "launch/process/process.h"
#include "rank_page/rank_page.h"

namespace lockstep {

/// The end of one rank.
struct RankEnd {
  int rank = 0;
  pid_t pid = 0;
  ProcessEnd how;
  double seconds = 0;       ///< from its start
  int wake_up = 0;          ///< which of the launcher's wake-ups saw it: ends of one wake-up have no known order
  bool stopped = false;     ///< it had been asked to stop before
  uint64_t peak_bytes = 0;  ///< the most memory it and what it had waited for ever had resident
  bool ended = true;        ///< false: it lives, and is accused by others
};

/// What a run comes to.
struct Verdict {
  int exit_code = 0;
  std::optional<RankEnd> culprit;
  /// Other ranks that ended in the culprit's wake-up and may have been first as well.
  std::vector<int> also_suspect;
  /// The culprit's own end, or that of a rank that may be it, is still to come and may change this verdict.
  bool settled = true;
  /// The rank whose page led to the culprit, where it is not the culprit that ended first, and what that rank says.
  std::optional<int> witness;
  std::string testimony;
  /// The rank whose calls and the culprit's do not match, where the witness says so.
  std::optional<int> opponent;
};

/// Judges the ends of a run's ranks, in the order in which they were seen, and what their pages say (one account a
/// rank, or none at all). The culprit is the first rank that failed: those that follow fail because it is gone, or
/// because they were stopped. Of several in one wake-up it is one that was killed by a signal, since what another rank
/// does kills no rank.
///
/// A rank that failed first and says that another was the cause is a victim: the culprit is the rank at the end of the
/// chain of causes, whether it has ended later, by code 0 or not yet. Where ranks accuse each other in a circle, or
/// accuse a peer that they cannot name and that does not show, the order of the ends decides as above.
Verdict judge(const std::vector<RankEnd>& ends, const std::vector<RankAccount>& accounts);

/// A rank that ended by code 127 because the dynamic loader found a library missing was never started.
int exit_code_of(const ProcessEnd& how, const std::deque<std::string>& tail);

/// Whether it ended by an exception that nobody caught, and not by a signal that only looks so.
bool ended_by_exception(const RankEnd& end, const RankAccount& account);

/// As below, or "threw: <what the exception says>".
std::string describe(const RankEnd& end, const RankAccount& account);

/// "exit code 3", "killed by SIGKILL (Killed)", "could not be started: Exec format error".
std::string describe(const ProcessEnd& how);

}  // namespace lockstep
