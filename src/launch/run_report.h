#pragma once

#include <vector>

#include "launch/diagnosis/failure_report.h"
#include "launch/process/team.h"
#include "launch/run_state.h"

namespace lockstep {

/// What is known when the ranks of a start have ended and the verdict is in the state.
struct ReportSources {
  const RunState& state;
  const Team& team;
  const LaunchOptions& options;
  const std::vector<RankCommand>& commands;  ///< by rank, or one for all if they run on other machines
  bool on_other_machines = false;
};

/// What to tell about that start, but for what is left of the training and the report's own path.
FailureReport report_of(const ReportSources& sources);

}  // namespace lockstep
