#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/diagnosis/failure_report.h"
#include "launch/output/display.h"
#include "launch/process/team.h"
#include "launch/run_journal.h"
#include "launch/run_record.h"
#include "launch/run_state.h"
#include "launch/state_keeper.h"

namespace lockstep {

/// Reports on a run: to the user on the terminal, to programs by the files in its folder. Verdicts and decisions have
/// already been made, and are in the state. When the run gives up, the reporter first has the remaining training state
/// written to disk.
class RunReporter {
 public:
  /// `folder` is the run's, or empty. `state_memory` is StateMemory's descriptor. The number of ranks may change
  /// meanwhile.
  /// REQUIRES: `options`, `places` (null: this machine) and `display` outlive it.
  RunReporter(const LaunchOptions& options, const std::string& folder, int state_memory, RankPlaces* places,
              Display& display);

  void tell_user(const std::string& text);

  void start_begins();
  void ranks_started(const RunState& state, Team& team);
  void rank_ended(const RankEnd& end);
  /// Called when all ranks have ended. `commands` is by rank, or one for all if they run on other machines.
  void start_ended(const RunState& state, Team& team, const std::vector<RankCommand>& commands);
  /// Called when no other start follows, because its ranks could not be started.
  void next_start_failed(const RunState& state, const std::string& why);
  void first_start_failed(const RunState& state);
  void run_ended(const RunState& state);

  /// Whether a start has ended, so that next_start_failed() has something to report.
  bool has_reported() const { return !report_.command.empty(); }

 private:
  void print(const std::string& lines);
  FailureReport report_of(const RunState& state, const Team& team, const std::vector<RankCommand>& commands) const;
  void record_start(const RunState& state);
  void keep_state(int exit_code);

  const LaunchOptions& options_;
  const std::string folder_;
  RankPlaces* const places_;
  Display& display_;
  RunJournal journal_;
  StateKeeper keeper_;
  std::optional<RunRecord> record_;  // since the start of the ranks
  double began_s_ = 0;               // of the current or last ranks; wall clock
  FailureReport report_;             // of the last start that has ended
};

}  // namespace lockstep
