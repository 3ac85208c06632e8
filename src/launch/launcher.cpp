#include "launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>

#include "base/clock.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/held_port.h"
#include "launch/launch_error.h"
#include "launch/process/team.h"
#include "launch/run_folder.h"
#include "launch/run_record.h"
#include "launch/run_state.h"
#include "rank_page/error_file.h"

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
  Launcher(const LaunchOptions& options, const EnvironmentBlock& environment);
  int run();

 private:
  void start_team();

  void watch(int fd, short events, std::function<void(const pollfd&)> act);
  void watch_all();
  int wait_ms() const;

  void take_signals();
  void note_end(Rank& rank);
  void report_dropped_clients();

  void apply(const RunEvent& event);
  void carry_out(const RunAction& action);
  bool is_over() const { return state_.phase == RunState::Phase::kOver; }
  RanksObserved observe() const {
    return team_->observe(state_.wants_process_states(), state_.wants_processor_times());
  }

  void conclude_run();
  FailureReport make_report(const Verdict& verdict, const RanksObserved& seen) const;
  std::string report_name() const;
  void write_report(const std::string& name);
  void end_run();
  void report_losses();
  void mark_logs();
  void say(const std::string& text) { print("lockstep: " + text + "\n"); }
  void print(const std::string& lines) {
    if (!options_.in_process) display_.print(lines);
  }

  const LaunchOptions options_;
  const EnvironmentBlock environment_;
  const std::vector<RankCommand> commands_;  // by rank
  const RunFolder folder_;
  const LauncherSettings settings_;
  Guard guard_;
  Display display_;
  TerminalInput input_;
  const HeldPort port_;
  const std::string run_id_ = new_run_id(std::chrono::system_clock::now(), ::getpid());
  const MemoryKills memory_ = count_memory_kills();  // before the ranks
  RunState state_;
  std::optional<Team> team_;
  std::optional<RunRecord> record_;  // in the folder, while the run lasts

  std::vector<pollfd> polled_;
  std::vector<std::function<void(const pollfd&)>> actions_;  // one for each of polled_
  int wake_ups_ = 0;
  bool due_ = false;  // something has happened since the pages were last read
  std::optional<Deadline> flushed_by_;
  bool done_ = false;
  std::string report_;  // of the last start
  int exit_code_ = kExitOk;
};

std::string host_name() {
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// Empty: there is no folder.
std::string run_dir_of(const LaunchOptions& options) {
  if (options.in_process) return "";
  if (!options.run_dir.empty()) return options.run_dir;
  return default_run_dir(options.command[0], std::chrono::system_clock::now(), ::getpid());
}

Launcher::Launcher(const LaunchOptions& options, const EnvironmentBlock& environment)
    : options_(options),
      environment_(environment),
      commands_(plan_ranks(options, environment)),
      folder_(run_dir_of(options), !options.run_dir.empty()),
      display_(options.shown_ranks),
      state_(RunState::begin({.ranks = options.ranks,
                              .grace = options.grace,
                              .hang_timeout = options.hang_timeout,
                              .max_restarts = options.max_restarts},
                             Clock::now())) {
  if (options.debugged_rank) check_terminal_for_debugger();
  for (const std::string& warning : plan_warnings(options)) say(warning);
  std::error_code ignored;
  // The report of an earlier run in this folder.
  if (!folder_.path().empty()) std::filesystem::remove(folder_.path() + "/report.json", ignored);
  start_team();
}

void Launcher::start_team() {
  record_.reset();
  team_.reset();
  team_.emplace(TeamSetup{.options = options_,
                          .environment = environment_,
                          .commands = commands_,
                          .folder = folder_.path(),
                          .settings = settings_,
                          .guard = guard_,
                          .display = display_,
                          .input = input_,
                          .master_port = port_.number(),
                          .run_id = run_id_},
                state_.restarts);
  if (!folder_.path().empty()) record_.emplace(folder_.path(), team_->record());
  if (!team_->has_board())
    say("the ranks have no pages, so only the order in which they end tells which failed first:  " +
        team_->board_failure());
}

int Launcher::run() {
  while (!done_) {
    polled_.clear();
    actions_.clear();
    watch_all();
    const int ready = ::poll(polled_.data(), polled_.size(), wait_ms());
    if (ready < 0 && errno != EINTR) throw_errno("polling");
    ++wake_ups_;
    for (size_t i = 0; ready > 0 && i < polled_.size(); ++i)
      if (polled_[i].revents != 0) actions_[i](polled_[i]);
    display_.tick();
    const auto wake_at = state_.wake_at();
    if (!is_over() && (due_ || (wake_at && *wake_at <= Clock::now()))) {
      due_ = false;
      apply(observe());
    }
    if (is_over() && !flushed_by_) end_run();
    if (is_over() && (!display_.pending() || flushed_by_->passed())) done_ = true;
  }
  return exit_code_;
}

void Launcher::watch(int fd, short events, std::function<void(const pollfd&)> act) {
  polled_.push_back({.fd = fd, .events = events, .revents = 0});
  actions_.push_back(std::move(act));
}

void Launcher::watch_all() {
  // Signals first: where the launcher is told to stop in the turn in which a rank ends, the rank was told as well.
  watch(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  for (Sink* sink : {&display_.out(), &display_.err()})
    if (sink->pending()) watch(sink->fd(), POLLOUT, [sink](const pollfd&) { sink->flush(); });
  if (is_over()) return;
  if (input_.fd() >= 0) watch(input_.fd(), input_.events(), [this](const pollfd&) { input_.pass_on(); });
  for (auto& rank : team_->ranks()) {
    for (auto& stream : rank.output.streams())
      if (stream.wanted()) watch(stream.pipe.get(), POLLIN, [&](const pollfd&) { rank.output.read(stream); });
    if (!rank.ended) watch(rank.process->pidfd(), POLLIN, [&](const pollfd&) { note_end(rank); });
  }
  team_->store().append_polled(polled_);
  actions_.resize(polled_.size(), [this](const pollfd& ready) {
    team_->store().handle(ready);
    report_dropped_clients();
  });
}

int Launcher::wait_ms() const {
  std::optional<Clock::time_point> at = is_over() ? std::nullopt : state_.wake_at();
  if (const auto due = display_.due()) at = at ? std::min(*at, *due) : *due;
  int wait = at ? Deadline(*at).remaining_ms() : -1;
  if (flushed_by_) wait = wait < 0 ? flushed_by_->remaining_ms() : std::min(wait, flushed_by_->remaining_ms());
  return wait;
}

void Launcher::take_signals() {
  while (const int signal = settings_.next_signal()) {
    if (signal == SIGCONT) {
      input_.resume();
      continue;
    }
    // The session that it was started from has ended: a run goes on without its terminal.
    if (signal == SIGHUP && display_.terminal_is_gone()) continue;
    if (is_over()) done_ = true;  // only its own output is left, which nobody reads
    due_ = true;
    apply(SignalReceived{signal});
  }
}

void Launcher::note_end(Rank& rank) {
  auto end = team_->take_end(rank);
  if (!end) return;
  end->wake_up = wake_ups_;
  due_ = true;
  apply(RankEnded{*end});
}

void Launcher::report_dropped_clients() {
  for (const auto& dropped : team_->store().take_dropped())
    if (!dropped.reason.empty())
      say("rank " + std::to_string(dropped.client) + " lost its connection to the key-value store: " + dropped.reason);
}

void Launcher::apply(const RunEvent& event) {
  Transition transition = next(std::move(state_), event, Clock::now());
  state_ = std::move(transition.state);
  for (const RunAction& action : transition.actions) carry_out(action);
}

void Launcher::carry_out(const RunAction& action) {
  switch (action.kind) {
    case RunAction::Kind::kSay:
      return say(action.text);
    case RunAction::Kind::kSignal:
      return team_->stop(action.signal);
    case RunAction::Kind::kAskToLeave:
      return team_->ask_to_leave();
    case RunAction::Kind::kKill:
      return team_->kill();
    case RunAction::Kind::kConclude:
      return conclude_run();
    case RunAction::Kind::kRestart:
      mark_logs();
      exit_code_ = kExitOk;
      return start_team();
  }
}

/// All ranks have ended, or never will: nothing more is awaited from them.
void Launcher::conclude_run() {
  team_->finish();
  display_.finish();
  report_losses();
  const RanksObserved seen = observe();
  const FailureReport report = make_report(conclude(state_, seen.ranks), seen);
  team_->await_end();
  exit_code_ = report.verdict.exit_code;
  if (exit_code_ == kExitOk) {
    if (state_.restarts > 0)
      say("succeeded after " + std::to_string(state_.restarts) + (state_.restarts == 1 ? " restart" : " restarts"));
    return;
  }
  if (options_.on_failure) {
    const auto& culprit = report.verdict.culprit;
    std::string what = report.what;
    // A rank that did not fail by itself is missed by others, or hung and was ended by us.
    const bool by_itself = culprit && culprit->how.failed() && !culprit->stopped;
    if (what.empty() && culprit) what = by_itself ? describe(culprit->how) : headline(report);
    for (const auto& line : report.stall) what.append("\n").append(line);
    if (!report.advice.empty()) what.append("\n").append(report.advice);
    options_.on_failure({exit_code_, culprit ? culprit->rank : -1, what});
  }
  if (folder_.path().empty()) return;
  print(format(report));
  report_ = to_json(report);
  if (!is_over()) write_report(report_name());
}

/// A failure before a restart has a file of its own.
std::string Launcher::report_name() const {
  return is_over() ? "report.json" : "restart_" + std::to_string(state_.restarts + 1) + ".json";
}

void Launcher::write_report(const std::string& name) {
  std::ofstream file(folder_.path() + "/" + name);
  if (!(file << report_).flush()) say(folder_.path() + "/" + name + " could not be written");
}

void Launcher::end_run() {
  flushed_by_.emplace(kFlushTimeout);
  if (exit_code_ == kExitOk) return;
  write_report(report_name());
  say("ends with exit code " + std::to_string(exit_code_));
}

FailureReport Launcher::make_report(const Verdict& verdict, const RanksObserved& seen) const {
  FailureReport report{.verdict = verdict,
                       .world_size = options_.ranks,
                       .host = host_name(),
                       .program = commands_[0].program,
                       .command = own_command_line(),
                       .killed = state_.killed,
                       .restarts = state_.restarts};
  if (!folder_.path().empty()) report.report_path = folder_.path() + "/" + report_name();
  if (team_->has_board())
    for (const auto& rank : seen.ranks) report.accounts.push_back(rank.account);
  if (state_.stop_signal != 0)
    report.stop_signal = std::string("SIG") + ::sigabbrev_np(state_.stop_signal);
  else if (state_.asked_at)
    report.stop_signal = "a signal to a rank";
  if (state_.hang) report.stall = state_.hang->lines;
  if (!verdict.culprit) return report;
  RankEnd& culprit = *report.verdict.culprit;
  const Rank& rank = team_->rank(culprit.rank);
  culprit.pid = rank.process->pid();
  report.program = commands_[static_cast<size_t>(culprit.rank)].program;
  report.tail = rank.output.tail().lines();
  report.log_path = rank.output.log().path();
  if (!folder_.path().empty()) report.what = read_error_file(Team::error_file(folder_.path(), culprit.rank));
  const RankStatus& account = seen.ranks[static_cast<size_t>(culprit.rank)].account;
  if (report.what.empty() && account.failure != RankFailure::kPeer) report.what = account.failure_text;
  report.memory = count_memory_kills();
  report.memory.count -= std::min(report.memory.count, memory_.count);
  report.verdict.exit_code = final_exit_code(report);
  report.advice = advice_on_hang(report, state_.hang, options_);
  return report;
}

void Launcher::report_losses() {
  for (const auto& rank : team_->ranks()) {
    if (!rank.ended)
      say("rank " + std::to_string(rank.number) + ", process " + std::to_string(rank.process->pid()) +
          ", survives even SIGKILL; it is left behind");
    const RankLog& log = rank.output.log();
    if (log.dropped_lines() > 0)
      say(std::to_string(log.dropped_lines()) + " lines of rank " + std::to_string(rank.number) +
          " could not be written to its log: " + log.drop_reason());
  }
  if (const std::string losses = display_.losses(); !losses.empty()) say(losses);
}

/// A restarted program continues in the same files.
void Launcher::mark_logs() {
  for (const auto& rank : team_->ranks()) {
    if (rank.output.log().path().empty()) continue;
    RankLog log(rank.output.log().path());
    log.add("--- lockstep: restart " + std::to_string(state_.restarts) + " ---\n");
  }
}

}  // namespace

int launch(const LaunchOptions& options, const EnvironmentBlock& environment) {
  // Descriptors 0, 1 and 2 must be open, so that no pipe takes their place.
  int fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::dup(fd);
  FileDescriptor(fd).reset();
  return Launcher(options, environment).run();
}

}  // namespace lockstep
