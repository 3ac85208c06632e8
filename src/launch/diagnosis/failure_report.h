#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "launch/diagnosis/verdict.h"
#include "launch/plan.h"

namespace lockstep {

/// The training state that outlives its ranks, as far as the launcher knows.
struct StateLeft {
  std::string path;  ///< of the newest complete checkpoint on disk; empty: none is known
  int64_t step = -1;
  int64_t in_memory = -1;  ///< step of the newest state in the launcher's memory; -1: none
  bool written = false;    ///< the state on disk was written from memory when the run gave up
  std::string problem;     ///< the reason why the state in memory is not on disk, or not in its own place
  bool suspect = false;    ///< the state in memory was saved by a start whose replicas diverged, or since
};

/// The state in words; empty if nothing is known. `goes_on`: the ranks are started again, so the memory stays.
std::string describe(const StateLeft& left, bool goes_on);

/// All that the user is told about a failed run.
struct FailureReport {
  Verdict verdict;
  int exit_code = 0;  ///< the launcher's: the verdict's, unless the reason for no restart has its own
  int world_size = 1;
  std::string host;
  std::string program;
  std::string command;               ///< the launcher's, quoted for a shell
  std::string what;                  ///< the culprit's own words (an exception's text); may be empty
  std::vector<RankStatus> accounts;  ///< by rank; empty without pages
  StateLeft left;
  bool goes_on = false;            ///< the ranks are started again, so the launcher's memory stays
  std::vector<std::string> stall;  ///< for a hang: each rank's activity
  std::string log_path;            ///< of the culprit; empty: it printed nothing
  std::string report_path;         ///< of this as JSON
  std::deque<std::string> tail;
  std::vector<int> killed;  ///< ranks that did not stop when asked
  int restarts = 0;         ///< made before, after failures
  int resizes = 0;          ///< made before, without failures: starts with another number of ranks
  std::string stop_signal;  ///< the signal that ended the run; empty: none
  std::string no_restart;   ///< the reason for no restart; empty: it is restarted, or restarts were not requested
  std::string advice;       ///< for a hang: advice if the rank was working; may be empty
};

/// Advice in case the rank that seems to hang was working: the timeout to raise. Empty if none applies. `hang` is the
/// launcher's observation; empty if a collective's own timeout expired.
std::string advice_on_hang(const FailureReport& report, const std::optional<Stall>& hang, const LaunchOptions& options);

/// The block for the terminal, without the line of the exit code.
std::string format(const FailureReport& report);

/// The report as one JSON object, for programs. docs/launcher.md names its fields.
std::string to_json(const FailureReport& report);

/// The failure, for a program that started the ranks.
RunFailure for_program(const FailureReport& report);

/// A word in one line that is safe on a terminal, and stays the same word when pasted into bash or zsh.
std::string pasted_word(const std::string& word);

/// This process's command line, made of such words.
std::string own_command_line();

}  // namespace lockstep
