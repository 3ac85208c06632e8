#include "launch/run_report.h"

#include "launch/run_text.h"

namespace lockstep {

FailureReport report_of(const ReportSources& sources) {
  const RunState& state = sources.state;
  const Evidence& evidence = state.evidence;
  const Team& team = sources.team;
  const auto& commands = sources.commands;
  FailureReport report{.verdict = state.verdict,
                       .exit_code = state.exit_code,
                       .world_size = sources.options.ranks,
                       .program = commands[0].program,
                       .command = own_command_line(),
                       .goes_on = state.phase != RunState::Phase::kOver,
                       .killed = state.killed,
                       .restarts = state.restarts_after_failures(),
                       .resizes = state.resizes,
                       .no_restart = state.no_restart};
  if (team.has_board())
    for (const auto& rank : evidence.ranks) report.accounts.push_back(rank.account);
  if (evidence.stop_signal != 0)
    report.stop_signal = signal_name(evidence.stop_signal);
  else if (evidence.asked_at)
    report.stop_signal = "a signal to a rank";
  if (evidence.hang) report.stall = evidence.hang->lines;
  if (!report.verdict.culprit) return report;
  RankEnd& culprit = *report.verdict.culprit;
  const Rank& rank = team.rank(culprit.rank);
  const RankStatus& account = evidence.ranks[static_cast<size_t>(culprit.rank)].account;
  culprit.pid = rank.pid;
  report.host = team.host_of(culprit.rank);
  report.program = commands[sources.on_other_machines ? 0 : static_cast<size_t>(culprit.rank)].program;
  report.tail = rank.output.tail().lines();
  report.log_path = rank.output.log().path();
  report.what = team.error_text(culprit.rank);
  if (report.what.empty() && account.failure != RankFailure::kPeer) report.what = account.failure_text;
  report.advice = advice_on_hang(report, evidence.hang, sources.options);
  return report;
}

}  // namespace lockstep
