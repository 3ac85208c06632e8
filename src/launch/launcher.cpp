#include "launch/launcher.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/state_memory.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/held_port.h"
#include "launch/launch_error.h"
#include "launch/poll_set.h"
#include "launch/process/local_team.h"
#include "launch/run_folder.h"
#include "launch/run_journal.h"
#include "launch/run_record.h"
#include "launch/run_report.h"
#include "launch/run_state.h"
#include "launch/run_text.h"
#include "launch/state_keeper.h"

// One thread, one poll loop. Each turn lists what to wait for (watch_all), waits, and lets each ready descriptor act.
// Whatever decides about the run - ends, signals, time, what the ranks' pages say - goes as an event through next(),
// which returns actions (run_state.h); this file only carries them out. Nothing in a turn blocks: it never waits for
// sockets, pipes or the terminal; only log files are written at once.

namespace lockstep {
namespace {

/// How long whoever reads the launcher's output may take for what the ranks printed.
constexpr std::chrono::seconds kFlushTimeout(30);

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const EnvironmentBlock& environment, RankPlaces* places);
  int run();

 private:
  void start_team();
  void fail_to_start(const Error& error);

  void watch_all();
  int wait_ms() const;

  void take_signals();
  void take_events_of_team();

  void apply(const RunEvent& event);
  void carry_out(const RunAction& action);
  bool is_over() const { return state_.phase == RunState::Phase::kOver; }
  RanksObserved observe() {
    if (!team_) return {};  // its start failed, and another follows
    return team_->observe(state_.wants_process_states(), state_.wants_processor_times());
  }
  int exit_code() const { return state_.exit_code; }
  bool has_reported() const { return !report_.command.empty(); }

  void gather_evidence();
  void report_start();
  void record_start();
  int next_restart() const { return is_over() ? 0 : state_.restarts + 1; }
  void end_run();
  void restart();
  void give_up(int exit_code);
  void tell_user(const std::string& text);
  void print(const std::string& lines) {
    if (!options_.in_process) display_.print(lines);
  }

  LaunchOptions options_;  // `ranks` changes where a run is elastic
  const EnvironmentBlock environment_;
  RankPlaces* const places_;           // null: this machine
  std::vector<RankCommand> commands_;  // by rank
  const RunFolder folder_;
  RunJournal journal_{folder_.path(), !options_.run_dir.empty()};
  const LauncherSettings settings_;
  Guard guard_;
  Display display_;
  TerminalInput input_;
  const HeldPort port_;
  const FileDescriptor state_memory_ = StateMemory::make();  // outlives the ranks, for those of a restart
  const std::string run_id_ = new_run_id(std::chrono::system_clock::now(), ::getpid());
  StateKeeper keeper_;
  RunState state_;
  std::unique_ptr<Team> team_;
  std::optional<RunRecord> record_;  // in the folder, while the run lasts

  PollSet polled_;
  int wake_ups_ = 0;
  bool due_ = false;  // something has happened since the pages were last read
  std::optional<Deadline> flushed_by_;
  bool done_ = false;
  double began_s_ = 0;    // the ranks that run now; wall clock
  FailureReport report_;  // of the last start that has ended
};

/// Elsewhere whoever starts the ranks plans them; here it only matters that there is such a program.
LaunchOptions one_rank_of(LaunchOptions options) {
  options.ranks = 1;
  return options;
}

Launcher::Launcher(const LaunchOptions& options, const EnvironmentBlock& environment, RankPlaces* places)
    : options_(options),
      environment_(environment),
      places_(places),
      commands_(plan_ranks(places == nullptr ? options : one_rank_of(options), environment)),
      folder_(run_dir_of(options), !options.run_dir.empty(), RunFolder::Use::kAlone),
      display_(options.shown_ranks),
      keeper_(state_memory_.get(), places, folder_.path()),
      state_(RunState::begin({.ranks = options.ranks,
                              .grace = options.grace,
                              .hang_timeout = options.hang_timeout,
                              .max_restarts = options.max_restarts,
                              .restarts_per_hour = options.restarts_per_hour,
                              .elastic = options.elastic},
                             Clock::now())) {
  if (options.debugged_rank) check_terminal_for_debugger();
  if (!folder_.lock_trouble().empty()) tell_user(folder_.lock_trouble());
  check_elastic(options, environment, places_ == nullptr);
  if (places_ == nullptr)
    for (const std::string& warning : plan_warnings(options, environment)) tell_user(warning);
  else if (const std::string warning = elastic_warning(options, environment); !warning.empty())
    tell_user(warning);
  start_team();
}

void Launcher::start_team() {
  began_s_ = seconds_since_1970();
  record_.reset();
  team_.reset();
  const TeamSetup setup{.options = options_,
                        .environment = environment_,
                        .commands = commands_,
                        .folder = folder_.path(),
                        .settings = settings_,
                        .guard = guard_,
                        .display = display_,
                        .input = input_,
                        .memory_fd = state_memory_.get(),
                        .master_port = port_.number(),
                        .run_id = run_id_};
  try {
    if (places_ == nullptr && commands_.size() != static_cast<size_t>(options_.ranks))
      commands_ = plan_ranks(options_, environment_);
    if (places_ == nullptr)
      team_ = std::make_unique<LocalTeam>(setup, state_.restarts);
    else
      team_ = places_->start(setup, state_.restarts);
  } catch (const Error& error) {
    return fail_to_start(error);
  }
  options_.ranks = state_.settings.ranks = static_cast<int>(team_->ranks().size());
  if (!folder_.path().empty()) {
    RunRecord::Contents contents = team_->record();
    contents.elastic = options_.elastic;
    if (places_ != nullptr) contents.launch_command = places_->launch_command();
    contents.restarts = state_.restarts;
    record_.emplace(folder_.path(), contents);
  }
  std::vector<long> pids;
  for (const Rank& rank : team_->ranks()) pids.push_back(rank.pid);
  journal_.started(state_.restarts, pids);
  if (!team_->has_board())
    tell_user("the ranks have no pages, so only the order in which they end tells which failed first:  " +
              team_->board_failure());
}

/// In a catch block. Throws, as it came, an error after which no rank has ever run.
void Launcher::fail_to_start(const Error& error) {
  const auto* const known = dynamic_cast<const LaunchError*>(&error);
  apply(StartFailed{.exit_code = known != nullptr ? known->exit_code : kExitResourceLimit,
                    .text = error.what(),
                    .from_outside = known != nullptr && known->from_outside,
                    .lost_ranks = known != nullptr ? known->lost_ranks : 0});
  if (!is_over()) return;
  if (!has_reported()) {
    if (!options_.run_dir.empty()) journal_.run_ended(exit_code());
    if (places_ != nullptr) places_->end(exit_code());
    throw;
  }
  tell_user(error.what());
  // The block is about the failure before, which is why there was another start.
  report_.exit_code = exit_code();
  report_.no_restart = std::string("the next start failed: ") + error.what();
  report_.goes_on = false;
  report_.report_path = journal_.report_path(0);
  keeper_.keep(exit_code());
  report_.left = keeper_.left();
  if (!folder_.path().empty()) print(format(report_));
}

int Launcher::run() {
  while (!done_) {
    polled_.clear();
    watch_all();
    polled_.wait(wait_ms());
    ++wake_ups_;
    take_events_of_team();
    display_.tick();
    const auto wake_at = state_.wake_at();
    if (!is_over() && (due_ || (wake_at && *wake_at <= Clock::now()))) {
      due_ = false;
      apply(observe());
    }
    if (is_over() && !flushed_by_) end_run();
    if (is_over() && (!display_.pending() || flushed_by_->passed())) done_ = true;
  }
  if (places_ != nullptr) places_->end(exit_code());
  return exit_code();
}

void Launcher::watch_all() {
  // Signals first: where the launcher is told to stop in the turn in which a rank ends, the rank was told as well.
  polled_.add(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  for (Sink* sink : {&display_.out(), &display_.err()})
    if (sink->pending()) polled_.add(sink->fd(), POLLOUT, [sink](const pollfd&) { sink->flush(); });
  if (is_over() && places_ == nullptr) return;
  if (input_.fd() >= 0 && !is_over())
    polled_.add(input_.fd(), input_.events(), [this](const pollfd&) { input_.pass_on(); });
  if (team_) team_->watch(polled_);
}

int Launcher::wait_ms() const {
  std::optional<Clock::time_point> at = is_over() ? std::nullopt : state_.wake_at();
  if (const auto due = display_.due()) at = at ? std::min(*at, *due) : *due;
  if (const auto due = team_ ? team_->due() : std::nullopt; due && !is_over()) at = at ? std::min(*at, *due) : *due;
  int wait = at ? Deadline(*at).remaining_ms() : -1;
  if (flushed_by_) wait = wait < 0 ? flushed_by_->remaining_ms() : std::min(wait, flushed_by_->remaining_ms());
  return wait;
}

void Launcher::take_signals() {
  while (const int signal = settings_.next_signal()) {
    if (signal == SIGCONT) {
      input_.resume();
      due_ = true;  // `lockstep resize` wakes the launcher with it
      continue;
    }
    // The session that it was started from has ended: a run goes on without its terminal.
    if (signal == SIGHUP && display_.terminal_is_gone()) continue;
    if (is_over()) done_ = true;  // only its own output is left, which nobody reads
    due_ = true;
    apply(SignalReceived{signal});
  }
}

void Launcher::take_events_of_team() {
  if (!team_) return;
  team_->tick();
  if (is_over()) return;
  for (const std::string& message : team_->take_messages()) tell_user(message);
  // A scheduler signals all processes of a run: what comes from elsewhere is no second signal.
  if (const int signal = team_->take_signal(); signal != 0 && state_.evidence.stop_signal == 0) {
    due_ = true;
    apply(SignalReceived{signal});
  }
  for (RankEnd end : team_->take_ends()) {
    end.wake_up = wake_ups_;
    due_ = true;
    journal_.rank_ended(end.rank, describe(end.how), end.how.failed());
    apply(RankEnded{end});
  }
}

void Launcher::apply(const RunEvent& event) {
  Transition transition = next(std::move(state_), event, Clock::now());
  state_ = std::move(transition.state);
  for (const RunAction& action : transition.actions) carry_out(action);
}

void Launcher::carry_out(const RunAction& action) {
  switch (action.kind) {
    case RunAction::Kind::kTellUser:
      return tell_user(action.text);
    case RunAction::Kind::kSignal:
      return team_->stop(action.signal);
    case RunAction::Kind::kAskToLeave:
      return team_->ask_to_leave();
    case RunAction::Kind::kKill:
      return team_->kill();
    case RunAction::Kind::kGatherEvidence:
      return gather_evidence();
    case RunAction::Kind::kReport:
      return report_start();
    case RunAction::Kind::kRestart:
      return restart();
  }
}

/// All ranks have ended, or never will: nothing more is awaited from them.
void Launcher::gather_evidence() {
  team_->finish();
  display_.finish();
  for (const std::string& line : team_->losses()) tell_user(line);
  if (const std::string losses = display_.losses(); !losses.empty()) tell_user(losses);
  apply(EvidenceGathered{observe()});
}

void Launcher::report_start() {
  team_->await_end();
  keeper_.note(state_.evidence.ranks);
  report_ = report_of({.state = state_,
                       .team = *team_,
                       .options = options_,
                       .commands = commands_,
                       .on_other_machines = places_ != nullptr});
  report_.left = keeper_.left();
  report_.report_path = journal_.report_path(next_restart());
  if (is_over() && exit_code() != kExitOk) {
    keeper_.keep(exit_code());
    report_.left = keeper_.left();
  }
  record_start();
  if (state_.is_resizing()) return;
  if (exit_code() == kExitOk) {
    const std::string starts = earlier_starts(state_.restarts_after_failures(), state_.resizes);
    if (!starts.empty()) tell_user("succeeded after " + starts);
    return;
  }
  if (options_.on_failure) options_.on_failure(for_program(report_));
  if (folder_.path().empty()) return;
  print(format(report_));
  if (!is_over()) journal_.write_report(report_, next_restart());
}

void Launcher::record_start() {
  StartRecord start{.number = state_.restarts,
                    .ranks = options_.ranks,
                    .began_s = began_s_,
                    .ended_s = seconds_since_1970(),
                    .first_step = state_.evidence.ranks[0].account.first_step,
                    .exit_code = exit_code(),
                    .culprit = report_.verdict.culprit ? report_.verdict.culprit->rank : -1,
                    .resized = state_.is_resizing()};
  for (const auto& rank : state_.evidence.ranks) start.steps = std::max(start.steps, rank.account.steps);
  journal_.start_ended(start, report_, is_over());
}

void Launcher::end_run() {
  flushed_by_.emplace(kFlushTimeout);
  if (exit_code() != kExitOk) {
    if (report_.goes_on) {  // a signal came before the next start
      report_.goes_on = false;
      report_.report_path = journal_.report_path(0);
      give_up(exit_code());
      report_.left = keeper_.left();
    }
    if (has_reported()) journal_.write_report(report_, 0);
    tell_user("ends with exit code " + std::to_string(exit_code()));
  }
  journal_.run_ended(exit_code());
}

/// No start follows the one that was reported.
void Launcher::give_up(int exit_code) {
  keeper_.keep(exit_code);
  tell_user("kept: " + describe(keeper_.left(), /*goes_on=*/false));
}

void Launcher::tell_user(const std::string& text) {
  journal_.said(text);
  print("lockstep: " + text + "\n");
  for (const std::string& trouble : journal_.take_troubles()) print("lockstep: " + trouble + "\n");
}

void Launcher::restart() {
  if (team_) team_->mark_logs("--- lockstep: restart " + std::to_string(state_.restarts) + " ---\n");
  options_.ranks = state_.settings.ranks;
  if (places_ != nullptr && state_.left_out >= 0) places_->leave_out(state_.left_out);
  start_team();
}

}  // namespace

int launch(const LaunchOptions& options, const EnvironmentBlock& environment, RankPlaces* places) {
  // Descriptors 0, 1 and 2 must be open, so that no pipe takes their place.
  int fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::dup(fd);
  FileDescriptor(fd).reset();
  return Launcher(options, environment, places).run();
}

}  // namespace lockstep
