#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// One start of a run: its ranks, from their start to their end.
struct StartRecord {
  int number = 0;  ///< from 0
  int ranks = 1;
  double began_s = 0, ended_s = 0;  ///< wall clock, since 1970
  int64_t first_step = 0;           ///< of the checkpoint that it resumed
  int64_t steps = 0;                ///< made by it
  int exit_code = 0;                ///< the run's, if this had been the last start
  int culprit = -1;                 ///< the rank that failed; -1: none
  bool resized = false;             ///< it left so that the run continues with another number of ranks
};

double seconds_since_1970();

std::string line_of_start(const StartRecord& start);
/// The name of the report of the failure before this restart, numbered from 1.
std::string restart_report(int restart);
/// Called after a report was written: a run that lives for months keeps only the newest kRestartReports.
void prune_restart_reports(const std::string& folder, int newest);
constexpr int kRestartReports = 10;

/// Deletes an earlier run's file of starts and its reports.
void forget_earlier_run(const std::string& folder);

}  // namespace lockstep
