#include "launch/run_reporter.h"

#include <algorithm>

#include "base/clock.h"
#include "launch/launch_error.h"
#include "launch/run_text.h"

namespace lockstep {
namespace {

bool is_over(const RunState& state) { return state.phase == RunState::Phase::kOver; }

int next_restart(const RunState& state) { return is_over(state) ? 0 : state.restarts + 1; }

std::string asked_by(const Evidence& evidence) {
  if (evidence.stop_signal != 0) return signal_name(evidence.stop_signal);
  return evidence.asked_at ? "a signal to a rank" : "";
}

/// Adds facts about the culprit that are not in the verdict.
void add_culprit(FailureReport& report, const RunState& state, const Team& team, const std::string& program) {
  RankEnd& culprit = *report.verdict.culprit;
  const Rank& rank = team.rank(culprit.rank);
  const RankStatus& account = state.evidence.ranks[static_cast<size_t>(culprit.rank)].account;
  culprit.pid = rank.pid;
  report.host = team.host_of(culprit.rank);
  report.program = program;
  report.tail = rank.output.tail().lines();
  report.log_path = rank.output.log().path();
  report.what = team.error_text(culprit.rank);
  if (report.what.empty() && account.failure != RankFailure::kPeer) report.what = account.failure_text;
}

}  // namespace

RunReporter::RunReporter(const LaunchOptions& options, const std::string& folder, int state_memory, RankPlaces* places,
                         Display& display)
    : options_(options),
      folder_(folder),
      places_(places),
      display_(display),
      journal_(folder, !options.run_dir.empty()),
      keeper_(state_memory, places, folder) {}

void RunReporter::tell_user(const std::string& text) {
  journal_.said(text);
  print("lockstep: " + text + "\n");
  for (const std::string& trouble : journal_.take_troubles()) print("lockstep: " + trouble + "\n");
}

void RunReporter::print(const std::string& lines) {
  if (!options_.in_process) display_.print(lines);
}

void RunReporter::start_begins() {
  began_s_ = seconds_since_1970();
  record_.reset();
}

void RunReporter::ranks_started(const RunState& state, Team& team) {
  if (!folder_.empty()) {
    RunRecord::Contents contents = team.record();
    contents.elastic = options_.elastic;
    if (places_ != nullptr) contents.launch_command = places_->launch_command();
    contents.restarts = state.restarts;
    record_.emplace(folder_, contents);
  }
  std::vector<long> pids;
  for (const Rank& rank : team.ranks()) pids.push_back(rank.pid);
  journal_.started(state.restarts, pids);
  if (!team.has_board())
    tell_user("the ranks have no pages, so only the order in which they end tells which failed first:  " +
              team.board_failure());
}

void RunReporter::rank_ended(const RankEnd& end) { journal_.rank_ended(end.rank, describe(end.how), end.how.failed()); }

void RunReporter::start_ended(const RunState& state, Team& team, const std::vector<RankCommand>& commands) {
  keeper_.note(state.evidence.ranks, state.verdict.exit_code);
  report_ = report_of(state, team, commands);
  report_.left = keeper_.left();
  report_.report_path = journal_.report_path(next_restart(state));
  if (is_over(state) && state.exit_code != kExitOk) keep_state(state.exit_code);
  record_start(state);
  if (state.is_resizing()) return;
  if (state.exit_code == kExitOk) {
    const std::string starts = earlier_starts(state.restarts_after_failures(), state.resizes);
    if (!starts.empty()) tell_user("succeeded after " + starts);
    return;
  }
  if (options_.on_failure) options_.on_failure(for_program(report_));
  if (folder_.empty()) return;
  print(format(report_));
  if (!is_over(state)) journal_.write_report(report_, next_restart(state));
}

/// The report, without the remaining training state and the report's own path.
FailureReport RunReporter::report_of(const RunState& state, const Team& team,
                                     const std::vector<RankCommand>& commands) const {
  const Evidence& evidence = state.evidence;
  FailureReport report{.verdict = state.verdict,
                       .exit_code = state.exit_code,
                       .world_size = options_.ranks,
                       .program = commands[0].program,
                       .command = own_command_line(),
                       .goes_on = !is_over(state),
                       .killed = state.killed,
                       .restarts = state.restarts_after_failures(),
                       .resizes = state.resizes,
                       .stop_signal = asked_by(evidence),
                       .no_restart = state.no_restart};
  if (team.has_board())
    for (const auto& rank : evidence.ranks) report.accounts.push_back(rank.account);
  if (evidence.hang) report.stall = evidence.hang->lines;
  if (!report.verdict.culprit) return report;
  const auto culprit = static_cast<size_t>(report.verdict.culprit->rank);
  add_culprit(report, state, team, commands[places_ != nullptr ? 0 : culprit].program);
  report.advice = advice_on_hang(report, evidence.hang, options_);
  return report;
}

void RunReporter::record_start(const RunState& state) {
  const auto& ranks = state.evidence.ranks;
  StartRecord start{.number = state.restarts,
                    .ranks = options_.ranks,
                    .began_s = began_s_,
                    .ended_s = seconds_since_1970(),
                    .first_step = ranks[0].account.first_step,
                    .exit_code = state.exit_code,
                    .culprit = state.verdict.culprit ? state.verdict.culprit->rank : -1,
                    .resized = state.is_resizing()};
  for (const auto& rank : ranks) start.steps = std::max(start.steps, rank.account.steps);
  journal_.start_ended(start, report_, is_over(state));
}

/// Called when the run gives up.
void RunReporter::keep_state(int exit_code) {
  keeper_.keep(exit_code);
  report_.left = keeper_.left();
}

void RunReporter::next_start_failed(const RunState& state, const std::string& why) {
  tell_user(why);
  // The block describes the previous failure, which caused the new start.
  report_.exit_code = state.exit_code;
  report_.no_restart = "the next start failed: " + why;
  report_.goes_on = false;
  report_.report_path = journal_.report_path(0);
  keep_state(state.exit_code);
  if (!folder_.empty()) print(format(report_));
}

void RunReporter::first_start_failed(const RunState& state) {
  if (!options_.run_dir.empty()) journal_.run_ended(state.exit_code);
}

void RunReporter::run_ended(const RunState& state) {
  if (state.exit_code != kExitOk) {
    if (report_.goes_on) {  // a signal arrived before the next start
      report_.goes_on = false;
      report_.report_path = journal_.report_path(0);
      keep_state(state.exit_code);
      tell_user("kept: " + describe(keeper_.left(), /*goes_on=*/false));
    }
    if (has_reported()) journal_.write_report(report_, 0);
    tell_user("ends with exit code " + std::to_string(state.exit_code));
  }
  journal_.run_ended(state.exit_code);
}

}  // namespace lockstep
