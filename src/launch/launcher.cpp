#include "launch/launcher.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>

#include "base/clock.h"
#include "base/held_port.h"
#include "base/rank_board.h"
#include "base/socket.h"
#include "launch/debugger.h"
#include "launch/display.h"
#include "launch/guard.h"
#include "launch/launch_error.h"
#include "launch/process.h"
#include "launch/rank_command.h"
#include "launch/rank_output.h"
#include "launch/run_folder.h"
#include "launch/terminal_input.h"
#include "launch/verdict.h"
#include "rendezvous/key_value_server.h"

// One thread, one poll loop. Each turn names what to wait for (watch_all), waits, lets each ready descriptor act, and
// then moves the run's phase on (advance). Nothing in a turn blocks: sockets, pipes and the terminal are never waited
// for, only log files are written as they come.
//
//   kRunning --all ranks ended--------------------------------------------------------> kFlushing --> kDone
//   kRunning --a rank failed*, or a signal--> kStopping --grace over, or a signal--> kKilling --all ended--> kFlushing
//
// * by its own fault, as far as is known: a rank that accuses another is given kSettleTime to be confirmed by the
// other's end. kStopping also goes straight to kFlushing when all ranks have ended. kKilling ends by itself: a process
// that does not die of SIGKILL is reported and left.

namespace lockstep {
namespace {

constexpr std::chrono::seconds kKillTimeout(10);
constexpr std::chrono::milliseconds kGroupTimeout(500);
constexpr std::chrono::seconds kFlushTimeout(30);
/// How long a rank that others accuse may take to end by itself before it is told to: its own end says more.
constexpr std::chrono::milliseconds kSettleTime(250);

struct Rank {
  Rank(int rank, const std::string& folder)
      : number(rank), output(rank, folder + "/rank_" + std::to_string(rank) + ".log") {}

  const int number;
  std::optional<Process> process;
  RankOutput output;
  bool ended = false;
  Clock::time_point started;
};

class Launcher {
 public:
  Launcher(const LaunchOptions& options, const EnvironmentBlock& environment);
  int run();

 private:
  enum class Phase { kRunning, kStopping, kKilling, kFlushing, kDone };

  void start_rank(int rank, const RankCommand& command, const EnvironmentBlock& environment);
  FileDescriptor rank_input(int rank);

  void watch(int fd, short events, std::function<void(const pollfd&)> act);
  void watch_all();
  int wait_ms() const;

  void take_signals();
  void note_end(Rank& rank);
  void report_dropped_clients();

  void advance();
  void stop_ranks(int signal);
  void kill_ranks();
  void finish();
  void report_losses();
  void await_groups();
  void signal_running(int signal);
  std::vector<RankAccount> accounts() const;
  bool all_ended() const { return ends_.size() == ranks_.size(); }
  void say(const std::string& text) { print("lockstep: " + text + "\n"); }
  void print(const std::string& lines) { display_.print(lines); }

  const LaunchOptions options_;
  const std::vector<RankCommand> commands_;  // by rank
  const RunFolder folder_;
  const LauncherSettings settings_;
  Guard guard_;
  Display display_;
  TerminalInput input_;
  KeyValueServer store_;
  const HeldPort port_;
  std::optional<RankBoard> board_;
  std::optional<LentTerminal> lent_terminal_;  // to the debugger
  std::deque<Rank> ranks_;                     // stay where they are: Rank cannot move

  std::vector<pollfd> polled_;
  std::vector<std::function<void(const pollfd&)>> actions_;  // one for each of polled_
  Phase phase_ = Phase::kRunning;
  std::optional<Deadline> deadline_;  // of kStopping and kKilling, and of a rank's end that kRunning awaits
  int wake_ups_ = 0;
  std::vector<RankEnd> ends_;  // as they were seen
  int stop_signal_ = 0;        // the signal that ended the run, before any rank had failed
  int signals_ = 0;
  std::vector<int> killed_;
  int exit_code_ = kExitOk;
};

std::string run_dir_of(const LaunchOptions& options) {
  if (!options.run_dir.empty()) return options.run_dir;
  return default_run_dir(options.command[0], std::chrono::system_clock::now(), ::getpid());
}

Launcher::Launcher(const LaunchOptions& options, const EnvironmentBlock& environment)
    : options_(options),
      commands_(plan_ranks(options, environment)),
      folder_(run_dir_of(options), !options.run_dir.empty()),
      display_(options.shown_ranks) {
  if (options.debugged_rank) check_terminal_for_debugger();
  try {
    board_.emplace(options.ranks);
  } catch (const Error& error) {
    // Programs that use little memory run all the same.
    say(std::string("the ranks have no pages, so who fails first is told by the order of ends alone: ") + error.what());
  }
  for (const std::string& warning : plan_warnings(options)) say(warning);
  for (int rank = 0; rank < options.ranks; ++rank) start_rank(rank, commands_[static_cast<size_t>(rank)], environment);
}

void Launcher::start_rank(int rank, const RankCommand& command, const EnvironmentBlock& environment) {
  Rank& started = ranks_.emplace_back(rank, folder_.path());
  auto [ours, theirs] = make_socket_pair();
  store_.add_client(std::move(ours));
  // A debugger has the terminal itself: its rank's output is not kept.
  const bool debugged = rank == options_.debugged_rank;
  FileDescriptor output, error, input;
  if (!debugged) {
    auto& [out, err] = started.output.streams();
    output = started.output.open(out);
    error = started.output.open(err);
    display_.connect(rank, started.output);
    input = rank_input(rank);
  }
  const RankPlace place{.rank = rank,
                        .world_size = options_.ranks,
                        .run_dir = folder_.path(),
                        .store_fd = theirs.get(),
                        .page_fd = board_ ? board_->fd() : -1,
                        .master_port = port_.number(),
                        .debugged = options_.debugged_rank.has_value(),
                        .terminal_columns = debugged ? std::nullopt : display_.columns_for(rank)};
  std::vector<int> kept = {theirs.get()};
  if (board_) kept.push_back(board_->fd());
  started.started = Clock::now();
  started.process.emplace(ProcessStart{.program = command.program,
                                       .arguments = command.arguments,
                                       .environment = rank_environment(environment, place),
                                       .cpus = command.placement.cpus,
                                       .memory_node = command.placement.memory_node,
                                       .input = input ? input.get() : STDIN_FILENO,
                                       .output = output ? output.get() : STDOUT_FILENO,
                                       .error = error ? error.get() : STDERR_FILENO,
                                       .announce = guard_.registry(),
                                       .kept = std::move(kept),
                                       .ignore_suspend = debugged},
                          settings_);
  if (debugged) lent_terminal_.emplace(started.process->pid());
}

/// Empty when the rank inherits the launcher's.
FileDescriptor Launcher::rank_input(int rank) {
  FileDescriptor input;
  if (rank == 0 && !options_.debugged_rank) {
    if (::isatty(STDIN_FILENO) == 1) input_ = TerminalInput(STDIN_FILENO, input);
    return input;
  }
  input = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input) throw LaunchError(kExitResourceLimit, std::string("opening /dev/null: ") + std::strerror(errno));
  return input;
}

int Launcher::run() {
  while (phase_ != Phase::kDone) {
    polled_.clear();
    actions_.clear();
    watch_all();
    const int ready = ::poll(polled_.data(), polled_.size(), wait_ms());
    if (ready < 0 && errno != EINTR) throw_errno("polling");
    ++wake_ups_;
    for (size_t i = 0; ready > 0 && i < polled_.size(); ++i)
      if (polled_[i].revents != 0) actions_[i](polled_[i]);
    display_.tick();
    advance();
  }
  await_groups();
  return exit_code_;
}

void Launcher::watch(int fd, short events, std::function<void(const pollfd&)> act) {
  polled_.push_back({.fd = fd, .events = events, .revents = 0});
  actions_.push_back(std::move(act));
}

void Launcher::watch_all() {
  // Signals first: a rank that ends in the same turn as the launcher is told to stop was told so as well.
  watch(settings_.signal_fd(), POLLIN, [this](const pollfd&) { take_signals(); });
  for (Sink* sink : {&display_.out(), &display_.err()})
    if (sink->pending()) watch(sink->fd(), POLLOUT, [sink](const pollfd&) { sink->flush(); });
  if (phase_ == Phase::kFlushing) return;
  if (input_.fd() >= 0) watch(input_.fd(), input_.events(), [this](const pollfd&) { input_.pass_on(); });
  for (auto& rank : ranks_) {
    for (auto& stream : rank.output.streams())
      if (stream.wanted()) watch(stream.pipe.get(), POLLIN, [&](const pollfd&) { rank.output.read(stream); });
    if (!rank.ended) watch(rank.process->pidfd(), POLLIN, [&](const pollfd&) { note_end(rank); });
  }
  store_.append_polled(polled_);
  actions_.resize(polled_.size(), [this](const pollfd& ready) {
    store_.handle(ready);
    report_dropped_clients();
  });
}

int Launcher::wait_ms() const {
  int wait = deadline_ ? deadline_->remaining_ms() : -1;
  if (const auto due = display_.due()) {
    const int until = Deadline(*due).remaining_ms();
    wait = wait < 0 ? until : std::min(wait, until);
  }
  return wait;
}

void Launcher::take_signals() {
  while (const int signal = settings_.next_signal()) {
    if (signal == SIGCONT) {
      input_.resume();
      continue;
    }
    // The end of the session that it was started from: a run goes on without its terminal.
    if (signal == SIGHUP && display_.terminal_is_gone()) continue;
    ++signals_;
    if (phase_ == Phase::kRunning) {
      stop_signal_ = signal;
      say(std::string("SIG") + ::sigabbrev_np(signal) + ": stopping the ranks");
      stop_ranks(signal == SIGINT ? SIGINT : SIGTERM);
    } else if (phase_ == Phase::kStopping) {
      kill_ranks();
    } else if (phase_ == Phase::kFlushing) {
      phase_ = Phase::kDone;
    }
  }
}

void Launcher::note_end(Rank& rank) {
  const auto how = rank.process->end();
  if (!how) return;
  rank.ended = true;
  if (rank.number == options_.debugged_rank) lent_terminal_.reset();
  ends_.push_back({.rank = rank.number,
                   .pid = rank.process->pid(),
                   .how = *how,
                   .seconds = seconds_since(rank.started),
                   .wake_up = wake_ups_,
                   .stopped = phase_ != Phase::kRunning});
}

void Launcher::report_dropped_clients() {
  for (const auto& dropped : store_.take_dropped())
    if (!dropped.reason.empty())
      say("rank " + std::to_string(dropped.client) + " lost its connection to the key-value store: " + dropped.reason);
}

void Launcher::advance() {
  if (phase_ == Phase::kRunning) {
    const Verdict verdict = judge(ends_, accounts(), 0);
    if (verdict.culprit && !all_ended()) {
      if (!verdict.settled && !deadline_) deadline_.emplace(kSettleTime);
      if (verdict.settled || deadline_->passed()) {
        say("rank " + std::to_string(verdict.culprit->rank) + ": " +
            (verdict.culprit->ended ? describe(verdict.culprit->how) : "others cannot go on without it") +
            "; stopping the other ranks");
        stop_ranks(SIGTERM);
      }
    }
  }
  const bool stopping = phase_ == Phase::kStopping || phase_ == Phase::kKilling;
  const bool late = stopping && deadline_->passed();
  if (phase_ < Phase::kFlushing && (all_ended() || (late && phase_ == Phase::kKilling)))
    finish();
  else if (late)
    kill_ranks();
  if (phase_ == Phase::kFlushing && (!display_.pending() || deadline_->passed())) phase_ = Phase::kDone;
}

std::vector<RankAccount> Launcher::accounts() const {
  std::vector<RankAccount> accounts;
  for (int rank = 0; board_ && rank < options_.ranks; ++rank)
    accounts.push_back(board_->page(rank).read(options_.ranks));
  return accounts;
}

void Launcher::stop_ranks(int signal) {
  phase_ = Phase::kStopping;
  deadline_.emplace(options_.grace);
  signal_running(signal);
  signal_running(SIGCONT);  // one that is stopped would not hear of it
}

void Launcher::kill_ranks() {
  phase_ = Phase::kKilling;
  deadline_.emplace(kKillTimeout);
  for (const auto& rank : ranks_)
    if (!rank.ended) killed_.push_back(rank.number);
  signal_running(SIGKILL);
}

void Launcher::signal_running(int signal) {
  for (auto& rank : ranks_)
    if (!rank.ended) rank.process->signal_group(signal);
}

/// All ranks have ended, or will not: nothing more of them is waited for.
void Launcher::finish() {
  phase_ = Phase::kFlushing;
  deadline_.emplace(kFlushTimeout);
  // What the ranks have started and left behind in their groups goes with them.
  for (auto& rank : ranks_) rank.process->signal_group(SIGKILL);
  for (auto& rank : ranks_) rank.output.finish();
  display_.finish();
  report_losses();
  Verdict verdict = judge(ends_, accounts(), stop_signal_);
  exit_code_ = verdict.exit_code;
  if (!verdict.culprit) {
    if (!killed_.empty()) say("killed rank " + list_ranks(killed_) + ", which did not stop when asked to");
    return;
  }
  const RankOutput& output = ranks_[static_cast<size_t>(verdict.culprit->rank)].output;
  if (!verdict.witness) verdict.exit_code = exit_code_ = exit_code_of(verdict.culprit->how, output.tail().lines());
  print(format({.verdict = verdict,
                .world_size = options_.ranks,
                .program = commands_[static_cast<size_t>(verdict.culprit->rank)].program,
                .log_path = output.log().path(),
                .tail = output.tail().lines(),
                .killed = killed_}));
}

/// SIGKILL was sent, but takes its time: waits until nothing is left, as long as that is to be expected.
void Launcher::await_groups() {
  const Deadline deadline(kGroupTimeout);
  for (auto& rank : ranks_)
    while (!rank.process->group_is_gone() && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

void Launcher::report_losses() {
  for (const auto& rank : ranks_) {
    if (!rank.ended)
      say("rank " + std::to_string(rank.number) + ", process " + std::to_string(rank.process->pid()) +
          ", does not end even by SIGKILL; it is left behind");
    const RankLog& log = rank.output.log();
    if (log.dropped_lines() > 0)
      say(std::to_string(log.dropped_lines()) + " lines of rank " + std::to_string(rank.number) +
          " could not be written to its log: " + log.drop_reason());
  }
  if (const std::string losses = display_.losses(); !losses.empty()) say(losses);
}

}  // namespace

int launch(const LaunchOptions& options, const EnvironmentBlock& environment) {
  // Descriptors 0, 1 and 2 are always ours to give: a pipe must not land on them.
  int fd = ::open("/dev/null", O_RDWR);
  while (fd >= 0 && fd <= STDERR_FILENO) fd = ::dup(fd);
  FileDescriptor(fd).reset();
  return Launcher(options, environment).run();
}

}  // namespace lockstep
