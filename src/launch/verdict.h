#pragma once

#include <sys/types.h>

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "launch/process.h"

namespace lockstep {

/// The end of one rank.
struct RankEnd {
  int rank = 0;
  pid_t pid = 0;
  ProcessEnd how;
  double seconds = 0;  ///< from its start
  int wake_up = 0;     ///< which of the launcher's wake-ups saw it: ends of one wake-up have no known order
};

/// What a run comes to.
struct Verdict {
  int exit_code = 0;
  std::optional<RankEnd> culprit;
  /// Other ranks that ended in the culprit's wake-up and may have been first as well.
  std::vector<int> also_suspect;
};

/// Judges the ends of a run's ranks, in the order in which they were seen. The culprit is the first rank that failed:
/// those that follow fail because it is gone, or because they were stopped. Of several in one wake-up it is one
/// that was killed by a signal, since what another rank does kills no rank.
/// `stop_signal`: the signal to the launcher that ended the run, before any rank had failed; 0 when none did.
Verdict judge(const std::vector<RankEnd>& ends, int stop_signal);

/// A rank that ended by code 127 because the dynamic loader found a library missing was never started.
int exit_code_of(const ProcessEnd& how, const std::deque<std::string>& tail);

/// "exit code 3", "killed by SIGKILL (Killed)", "could not be started: Exec format error".
std::string describe(const ProcessEnd& how);

/// The block of text that reports a failure.
struct FailureReport {
  Verdict verdict;
  int world_size = 1;
  std::string program;
  std::string log_path;  ///< empty: the culprit printed nothing
  std::deque<std::string> tail;
  std::vector<int> killed;  ///< ranks that did not stop when they were asked to
};
std::string format(const FailureReport& report);

/// "0, 2-5".
std::string list_ranks(const std::vector<int>& ascending);

}  // namespace lockstep
