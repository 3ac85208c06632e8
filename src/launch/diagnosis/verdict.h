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
  int wake_up = 0;          ///< the launcher's wake-up that saw it: ends of one wake-up have no known order
  bool stopped = false;     ///< it had been asked to stop before
  uint64_t peak_bytes = 0;  ///< the most resident memory it, or a child it waited for, ever had
  std::string lost;         ///< kLost: what is known of its machine
  bool ended = true;        ///< false: it is still running, and others accuse it
};

/// The result of a run.
struct Verdict {
  int exit_code = 0;
  std::optional<RankEnd> culprit;
  /// Other ranks that ended in the culprit's wake-up and may have failed first.
  std::vector<int> also_suspect;
  /// False: the culprit, or a rank that may be it, has not ended yet, and its end may change this verdict.
  bool settled = true;
  /// Where the culprit is not the rank that ended first: the rank whose page led to it, and what that rank says.
  std::optional<int> witness;
  std::string testimony;
  /// The rank whose calls do not match the culprit's, where the witness names one.
  std::optional<int> opponent;
};

/// Judges the ends of a run's ranks, in the order in which they were seen, and what their pages say (one account a
/// rank, or none at all). The culprit is the first rank that failed: later ones fail because it is gone, or because
/// they were stopped. Of several in one wake-up it is one that was killed by a signal, since no rank is killed by what
/// another does.
///
/// A rank that failed first and names another as the cause is a victim: the culprit is the rank at the end of the chain
/// of causes, whether it ended later, with code 0 or not yet. Where ranks accuse each other in a circle, or accuse a
/// peer that they cannot name and that does not show up, the order of the ends decides as above.
Verdict judge(const std::vector<RankEnd>& ends, const std::vector<RankStatus>& accounts);

/// The code of a failure whose kind the rank itself noted; empty where its end alone decides.
std::optional<int> noted_exit_code(const RankStatus& account);

/// From the end of the process alone.
int exit_code_of(const ProcessEnd& how);

/// The library that the dynamic loader did not find, from the last lines of a rank that ended with 127; empty: it names
/// none. Such a rank was never started.
std::string missing_library(const std::deque<std::string>& tail);

/// Whether it ended with an exception that nobody caught, rather than by a signal that looks like one.
bool ended_by_exception(const RankEnd& end, const RankStatus& account);

/// Whether the rank has not joined the others, as far as its page says.
bool is_before_join(const RankStatus& account);

/// Null: the rank has not ended.
const RankEnd* find_end(const std::vector<RankEnd>& ends, int rank);

/// As below, or "threw: <the exception's text>".
std::string describe(const RankEnd& end, const RankStatus& account);

/// "exit code 3", "killed by SIGKILL (Killed)", "could not be started: Exec format error".
std::string describe(const ProcessEnd& how);

}  // namespace lockstep
