#include "launch/run_report.h"

#include "launch/run_text.h"

namespace lockstep {

FailureReport report_of(const ReportSources& sources) {
  const RunState& state = sources.state;
  const Team& team = sources.team;
  const auto& commands = sources.commands;
  FailureReport report{.verdict = state.verdict,
                       .world_size = sources.options.ranks,
                       .program = commands[0].program,
                       .command = own_command_line(),
                       .goes_on = state.phase != RunState::Phase::kOver,
                       .killed = state.killed,
                       .restarts = state.restarts_after_failures(),
                       .resizes = state.resizes,
                       .no_restart = state.no_restart,
                       .too_few_ranks = state.too_few};
  if (team.has_board())
    for (const auto& rank : sources.seen.ranks) report.accounts.push_back(rank.account);
  if (state.stop_signal != 0)
    report.stop_signal = signal_name(state.stop_signal);
  else if (state.asked_at)
    report.stop_signal = "a signal to a rank";
  if (state.hang) report.stall = state.hang->lines;
  if (!report.verdict.culprit) return report;
  RankEnd& culprit = *report.verdict.culprit;
  const Rank& rank = team.rank(culprit.rank);
  const RankView& seen = sources.seen.ranks[static_cast<size_t>(culprit.rank)];
  culprit.pid = rank.pid;
  report.host = team.host_of(culprit.rank);
  report.program = commands[sources.on_other_machines ? 0 : static_cast<size_t>(culprit.rank)].program;
  report.tail = rank.output.tail().lines();
  report.log_path = rank.output.log().path();
  report.what = team.error_text(culprit.rank);
  if (report.what.empty() && seen.account.failure != RankFailure::kPeer) report.what = seen.account.failure_text;
  report.memory = seen.memory;
  report.advice = advice_on_hang(report, state.hang, sources.options);
  return report;
}

}  // namespace lockstep
