#include "launch/launcher.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/clock.h"
#include "base/state_memory.h"
#include "launch/held_port.h"
#include "launch/launch_error.h"
#include "launch/poll_set.h"
#include "launch/process/local_team.h"
#include "launch/run_folder.h"
#include "launch/run_reporter.h"
#include "launch/run_state.h"

// One thread and one poll loop. Each turn lists the descriptors to wait for (watch_all), waits, and lets each ready one
// act. Everything that affects the run - ends, signals, time, the ranks' pages - goes as an event through next(), which
// returns actions (run_state.h). This file only carries them out, and RunReporter reports them. Nothing in a turn
// blocks: it never waits for sockets, pipes or the terminal; only log files are written at once.

namespace lockstep {
namespace {

/// How long a reader of the launcher's output may take for the rest of the ranks' output.
constexpr std::chrono::seconds kFlushTimeout(30);

struct SharedByStarts {
  explicit SharedByStarts(const LaunchOptions& options) : display(options.shown_ranks) {}

  const LauncherSettings settings;
  Guard guard;
  Display display;
  TerminalInput input;
  const HeldPort port;
  const FileDescriptor state_memory = StateMemory::make();  // outlives the ranks, for those of a restart
  const std::string run_id = new_run_id(std::chrono::system_clock::now(), ::getpid());
};

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

  void gather_evidence();
  void report_start();
  void restart();

  LaunchOptions options_;  // `ranks` changes in an elastic run
  const EnvironmentBlock environment_;
  RankPlaces* const places_;  // null: this machine
  std::vector<RankCommand> commands_;
  const RunFolder folder_;
  SharedByStarts shared_;
  RunReporter reporter_;
  RunState state_;
  std::unique_ptr<Team> team_;

  PollSet polled_;
  int wake_ups_ = 0;
  bool due_ = false;  // something has happened since the pages were last read
  std::optional<Deadline> flushed_by_;
  bool done_ = false;
};

/// Ranks on other machines are planned by their starter; here only the existence of the program matters.
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
      shared_(options),
      reporter_(options_, folder_.path(), shared_.state_memory.get(), places, shared_.display),
      state_(RunState::begin({.ranks = options.ranks,
                              .grace = options.grace,
                              .hang_timeout = options.hang_timeout,
                              .max_restarts = options.max_restarts,
                              .restarts_per_hour = options.restarts_per_hour,
                              .elastic = options.elastic},
                             Clock::now())) {
  if (options.debugged_rank) check_terminal_for_debugger();
  if (!folder_.lock_trouble().empty()) reporter_.tell_user(folder_.lock_trouble());
  check_elastic(options, environment, places_ == nullptr);
  if (places_ == nullptr)
    for (const std::string& warning : plan_warnings(options, environment)) reporter_.tell_user(warning);
  else if (const std::string warning = elastic_warning(options, environment); !warning.empty())
    reporter_.tell_user(warning);
  start_team();
}

void Launcher::start_team() {
  reporter_.start_begins();
  team_.reset();
  shared_.guard.renew();
  const TeamSetup setup{.options = options_,
                        .environment = environment_,
                        .commands = commands_,
                        .folder = folder_.path(),
                        .settings = shared_.settings,
                        .guard = shared_.guard,
                        .display = shared_.display,
                        .input = shared_.input,
                        .memory_fd = shared_.state_memory.get(),
                        .master_port = shared_.port.number(),
                        .run_id = shared_.run_id};
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
  reporter_.ranks_started(state_, *team_);
}

/// Called in a catch block. Rethrows unchanged an error after which no rank has ever run.
void Launcher::fail_to_start(const Error& error) {
  const auto* const known = dynamic_cast<const LaunchError*>(&error);
  apply(StartFailed{.exit_code = known != nullptr ? known->exit_code : kExitResourceLimit,
                    .text = error.what(),
                    .from_outside = known != nullptr && known->from_outside,
                    .lost_ranks = known != nullptr ? known->lost_ranks : 0});
  if (!is_over()) return;
  if (reporter_.has_reported()) return reporter_.next_start_failed(state_, error.what());
  reporter_.first_start_failed(state_);
  if (places_ != nullptr) places_->end(state_.exit_code);
  throw;
}

int Launcher::run() {
  while (!done_) {
    polled_.clear();
    watch_all();
    polled_.wait(wait_ms());
    ++wake_ups_;
    take_events_of_team();
    shared_.display.tick();
    const auto wake_at = state_.wake_at();
    if (!is_over() && (due_ || (wake_at && *wake_at <= Clock::now()))) {
      due_ = false;
      apply(observe());
    }
    if (is_over() && !flushed_by_) {
      flushed_by_.emplace(kFlushTimeout);
      reporter_.run_ended(state_);
    }
    if (is_over() && (!shared_.display.pending() || flushed_by_->passed())) done_ = true;
  }
  if (places_ != nullptr) places_->end(state_.exit_code);
  return state_.exit_code;
}

void Launcher::watch_all() {
  // Signals first: if the launcher is told to stop in the turn in which a rank ends, the rank was signalled as well.
  polled_.add(shared_.settings.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  for (Sink* sink : {&shared_.display.out(), &shared_.display.err()})
    if (sink->pending()) polled_.add(sink->fd(), POLLOUT, [sink](const pollfd&) { sink->flush(); });
  if (is_over() && places_ == nullptr) return;
  if (shared_.input.fd() >= 0 && !is_over())
    polled_.add(shared_.input.fd(), shared_.input.events(), [this](const pollfd&) { shared_.input.pass_on(); });
  if (team_) team_->watch(polled_);
}

int Launcher::wait_ms() const {
  std::optional<Clock::time_point> at = is_over() ? std::nullopt : state_.wake_at();
  if (const auto due = shared_.display.due()) at = at ? std::min(*at, *due) : *due;
  if (const auto due = team_ ? team_->due() : std::nullopt; due && !is_over()) at = at ? std::min(*at, *due) : *due;
  int wait = at ? Deadline(*at).remaining_ms() : -1;
  if (flushed_by_) wait = wait < 0 ? flushed_by_->remaining_ms() : std::min(wait, flushed_by_->remaining_ms());
  return wait;
}

void Launcher::take_signals() {
  while (const int signal = shared_.settings.next_signal()) {
    if (signal == SIGCONT) {
      shared_.input.resume();
      due_ = true;  // `lockstep resize` wakes the launcher with it
      continue;
    }
    // The session in which the run was started has ended: a run continues without its terminal.
    if (signal == SIGHUP && shared_.display.terminal_is_gone()) continue;
    if (is_over()) done_ = true;  // only its own output is left, and has no reader
    due_ = true;
    apply(SignalReceived{signal});
  }
}

void Launcher::take_events_of_team() {
  if (!team_) return;
  team_->tick();
  if (is_over()) return;
  for (const std::string& message : team_->take_messages()) reporter_.tell_user(message);
  // A scheduler signals all processes of a run: a signal to another process is not a second one.
  if (const int signal = team_->take_signal(); signal != 0 && state_.evidence.stop_signal == 0) {
    due_ = true;
    apply(SignalReceived{signal});
  }
  for (RankEnd end : team_->take_ends()) {
    end.wake_up = wake_ups_;
    due_ = true;
    reporter_.rank_ended(end);
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
      return reporter_.tell_user(action.text);
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
  shared_.display.finish();
  for (const std::string& line : team_->losses()) reporter_.tell_user(line);
  if (const std::string losses = shared_.display.losses(); !losses.empty()) reporter_.tell_user(losses);
  apply(EvidenceGathered{observe()});
}

void Launcher::report_start() {
  team_->await_end();
  reporter_.start_ended(state_, *team_, commands_);
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
