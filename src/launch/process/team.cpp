#include "launch/process/team.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/socket.h"
#include "launch/launch_error.h"
#include "launch/process/process_table.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kGroupTimeout(500);

std::string path_of(const std::string& folder, int rank, const char* ending) {
  return folder + "/rank_" + std::to_string(rank) + ending;
}

/// Empty when the rank inherits the launcher's.
FileDescriptor input_of(const TeamSetup& setup, int rank) {
  FileDescriptor input;
  if (rank == 0 && !setup.options.debugged_rank && !setup.options.in_process) {
    if (::isatty(STDIN_FILENO) == 1) setup.input = TerminalInput(STDIN_FILENO, input);
    return input;
  }
  input = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input) throw LaunchError(kExitResourceLimit, std::string("opening /dev/null: ") + std::strerror(errno));
  return input;
}

/// An exception that nobody catches ends in SIGABRT; any other signal has nothing to do with what was thrown.
bool failed_by_itself(const Rank& rank) {
  return rank.ended && rank.how.failed() && (rank.how.kind == ProcessEnd::Kind::kExited || rank.how.value == SIGABRT);
}

}  // namespace

std::string Team::error_file(const std::string& folder, int rank) {
  return folder.empty() ? "" : path_of(folder, rank, "_error.json");
}

RunRecord::Contents Team::record() const {
  RunRecord::Contents contents{.launcher = identify(::getpid()), .board_fd = board_ ? board_->fd() : -1};
  for (const auto& rank : ranks_) contents.ranks.push_back(identify(rank.process->pid()));
  return contents;
}

Team::Team(const TeamSetup& setup, int restarts) : options_(setup.options), guard_(setup.guard) {
  try {
    board_.emplace(options_.ranks);
  } catch (const Error& error) {
    board_failure_ = error.what();  // programs that need little memory can still run
  }
  for (int rank = 0; rank < options_.ranks; ++rank) {
    std::error_code ignored;
    std::filesystem::remove(error_file(setup.folder, rank), ignored);  // of an earlier start
    start_rank(setup, rank, restarts);
  }
}

void Team::start_rank(const TeamSetup& setup, int rank, int restarts) {
  Rank& started = ranks_.emplace_back(rank, path_of(setup.folder, rank, ".log"));
  const RankCommand& command = setup.commands[static_cast<size_t>(rank)];
  auto [ours, theirs] = make_socket_pair();
  store_.add_client(std::move(ours));
  // A debugger has the terminal to itself: its rank's output is not kept. Nor is that of lockstep::spawn's ranks.
  const bool debugged = rank == options_.debugged_rank;
  FileDescriptor output, error, input;
  if (!debugged && !options_.in_process) {
    auto& [out, err] = started.output.streams();
    output = started.output.open(out);
    error = started.output.open(err);
    setup.display.connect(rank, started.output);
  }
  if (!debugged) input = input_of(setup, rank);
  const RankPlace place{.rank = rank,
                        .world_size = options_.ranks,
                        .run_dir = setup.folder,
                        .store_fd = theirs.get(),
                        .page_fd = board_ ? board_->fd() : -1,
                        .error_file = error_file(setup.folder, rank),
                        .restarts = restarts,
                        .max_restarts = options_.max_restarts,
                        .master_port = setup.master_port,
                        .run_id = setup.run_id,
                        .threads = command.threads,
                        .debugged = options_.debugged_rank.has_value(),
                        .terminal_columns = debugged ? std::nullopt : setup.display.columns_for(rank)};
  std::vector<int> kept = {theirs.get()};
  if (board_) kept.push_back(board_->fd());
  started.started = Clock::now();
  started.process.emplace(ProcessStart{.program = command.program,
                                       .arguments = command.arguments,
                                       .environment = rank_environment(setup.environment, place),
                                       .cpus = command.placement.cpus,
                                       .memory_node = command.placement.memory_node,
                                       .input = input ? input.get() : STDIN_FILENO,
                                       .output = output ? output.get() : STDOUT_FILENO,
                                       .error = error ? error.get() : STDERR_FILENO,
                                       .announce = setup.guard.registry(),
                                       .kept = std::move(kept),
                                       .ignore_suspend = debugged},
                          setup.settings);
  if (debugged) lent_terminal_.emplace(started.process->pid());
}

std::optional<RankEnd> Team::take_end(Rank& rank) {
  if (rank.ended) return std::nullopt;
  const auto how = rank.process->end();
  if (!how) return std::nullopt;
  rank.ended = true;
  rank.how = *how;
  if (rank.number == options_.debugged_rank) lent_terminal_.reset();
  return RankEnd{.rank = rank.number,
                 .pid = rank.process->pid(),
                 .how = *how,
                 .seconds = seconds_since(rank.started),
                 .peak_bytes = rank.process->peak_bytes()};
}

RanksObserved Team::observe(bool process_states, bool processor_times) const {
  RanksObserved seen{.processor_times = processor_times};
  bool somebody_joins = false;
  for (const auto& rank : ranks_) {
    RankView& view = seen.ranks.emplace_back();
    if (board_) view.account = board_->page(rank.number).read(options_.ranks);
    view.ended = rank.ended;
    somebody_joins = somebody_joins || (!rank.ended && view.account.phase == RankStatus::Phase::kJoining);
    if (failed_by_itself(rank) || view.account.phase == RankStatus::Phase::kLeftByException)
      view.account = view.account.at_end();
    if (rank.ended || !process_states) continue;
    // The rank's own process may only have started the one that writes the page.
    view.process_state = process_state(rank.process->pid());
    if (view.process_state != 'T' && view.account.pid > 0) view.process_state = process_state(view.account.pid);
  }
  // Only then does it matter, and only for these ranks: it takes a look at all processes.
  for (size_t i = 0; somebody_joins && i < ranks_.size(); ++i)
    if (RankView& view = seen.ranks[i]; view.ended && may_be_waited_for(view.account))
      view.outlived = group_lives(ranks_[i].process->pid()) ||
                      (view.account.pid > 0 && view.account.pid != ranks_[i].process->pid() &&
                       process_state(view.account.pid) != 0);
  if (processor_times) {
    std::vector<ProcessFamily> families;
    for (size_t i = 0; i < ranks_.size(); ++i)
      families.push_back({.group = ranks_[i].process->pid(), .member = seen.ranks[i].account.pid});
    const auto times = lockstep::processor_times(families);
    for (size_t i = 0; i < ranks_.size(); ++i) seen.ranks[i].processor_time = times[i];
  }
  if (board_) {
    seen.stop_asked = board_->head().stop_asked.load() != 0;
    seen.stop_at = board_->head().stop_at.load();
  }
  return seen;
}

void Team::ask_to_leave() {
  if (board_) board_->head().stop_asked.store(1);
}

void Team::stop(int signal) {
  if (board_) board_->head().stopping.store(1);
  signal_running(signal);
  signal_running(SIGCONT);  // a stopped process would not get the signal
}

void Team::kill() { signal_running(SIGKILL); }

void Team::signal_running(int signal) {
  for (auto& rank : ranks_)
    if (!rank.ended) rank.process->signal_group(signal);
}

void Team::finish() {
  for (auto& rank : ranks_) rank.process->signal_group(SIGKILL);
  for (auto& rank : ranks_) rank.output.finish();
}

void Team::await_end() {
  // SIGKILL takes a moment.
  const Deadline deadline(kGroupTimeout);
  for (auto& rank : ranks_)
    if (rank.ended) guard_.forget(rank.process->pid());
  for (auto& rank : ranks_)
    while (!rank.process->group_is_gone() && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

}  // namespace lockstep
