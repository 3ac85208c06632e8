#include "launch/process/local_team.h"

#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/machine_name.h"
#include "base/socket.h"
#include "launch/diagnosis/failure_report.h"
#include "launch/launch_error.h"
#include "launch/process/process_table.h"
#include "launch/run_text.h"
#include "rank_page/error_file.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kGroupTimeout(500);
/// Descriptors of this process for a running rank: its two outputs, its connection to the store, its process, and the
/// reason why it could not be started.
constexpr size_t kDescriptorsOfARank = 5;
/// The ends that become a rank's, while it is started.
constexpr size_t kDescriptorsOfAStart = 6;

constexpr ProcessEnd kKilled{ProcessEnd::Kind::kSignalled, SIGKILL};

/// Empty if the rank inherits the launcher's.
FileDescriptor input_of(const TeamSetup& setup, int rank, bool share) {
  FileDescriptor input;
  if (rank == 0 && !share && !setup.options.debugged_rank && !setup.options.in_process) {
    if (::isatty(STDIN_FILENO) == 1) setup.input = TerminalInput(STDIN_FILENO, input);
    return input;
  }
  input = FileDescriptor(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!input) throw_limit("opening /dev/null");
  return input;
}

}  // namespace

LocalTeam::LocalTeam(const TeamSetup& setup, int restarts, MachineShare share)
    : options_(setup.options),
      folder_(setup.folder),
      guard_(setup.guard),
      share_(std::move(share)),
      before_(count_memory_kills()) {
  if (share_.count == 0) share_.count = share_.world_size = options_.ranks;
  try {
    board_.emplace(share_.world_size);
    board_->head().several_machines.store(share_.count < share_.world_size ? 1 : 0);
  } catch (const Error& error) {
    board_failure_ = error.what();  // programs that need little memory can still run
  }
  require_for_launch(kDescriptorsOfARank * static_cast<size_t>(share_.count) + kDescriptorsOfAStart,
                     "starting " + counted_ranks(share_.count));
  for (int rank = share_.first_rank; rank < share_.first_rank + share_.count; ++rank) {
    std::error_code ignored;
    std::filesystem::remove(error_file(folder_, rank), ignored);  // of an earlier start
    start_rank(setup, rank, restarts);
  }
}

RankPlace LocalTeam::place_of(const TeamSetup& setup, int rank, int restarts) const {
  const bool debugged = rank == options_.debugged_rank;
  const int local_rank = rank - share_.first_rank;
  auto columns = setup.display.columns_for(rank);
  if (rank == share_.terminal_rank) columns = share_.terminal_columns;
  return {.rank = rank,
          .world_size = share_.world_size,
          .local_rank = local_rank,
          .local_world_size = share_.count,
          .node = share_.node,
          .nodes = share_.nodes,
          .address = share_.address,
          .run_dir = setup.folder,
          .page_fd = board_ ? board_->fd() : -1,
          .memory_fd = setup.memory_fd,
          .error_file = error_file(setup.folder, rank),
          .restarts = restarts,
          .max_restarts = options_.max_restarts,
          .master_address = share_.master_address,
          .master_port = setup.master_port,
          .run_id = setup.run_id,
          .mark = guard_.mark(),
          .threads = setup.commands[static_cast<size_t>(local_rank)].threads,
          .debugged = options_.debugged_rank.has_value(),
          .terminal_columns = debugged ? std::nullopt : columns};
}

void LocalTeam::start_rank(const TeamSetup& setup, int rank, int restarts) {
  Rank& started = ranks_.emplace_back(rank, log_file(setup.folder, rank));
  const RankCommand& command = setup.commands[static_cast<size_t>(rank - share_.first_rank)];
  FileDescriptor theirs;
  if (share_.connect_to_store) {
    theirs = share_.connect_to_store(rank);
  } else {
    auto pair = make_socket_pair();
    store_.add_client(std::move(pair.first));
    theirs = std::move(pair.second);
  }
  // A debugger has the terminal to itself, so its rank's output is not kept. Nor is the output of lockstep::spawn's
  // ranks.
  const bool debugged = rank == options_.debugged_rank;
  FileDescriptor output, error, input;
  if (!debugged && !options_.in_process) {
    auto& [out, err] = started.output.streams();
    output = started.output.open(out);
    error = started.output.open(err);
    if (share_.take_output)
      started.output.forward(
          [this, rank](size_t stream, std::string_view bytes) { share_.take_output(rank, stream, bytes); });
    else
      setup.display.connect(rank, started.output);
  }
  if (!debugged) input = input_of(setup, rank, share_.connect_to_store != nullptr);
  RankPlace place = place_of(setup, rank, restarts);
  place.store_fd = theirs.get();
  std::vector<int> kept = {theirs.get()};
  if (board_) kept.push_back(board_->fd());
  if (setup.memory_fd >= 0) kept.push_back(setup.memory_fd);
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
  started.pid = started.process->pid();
  if (debugged) lent_terminal_.emplace(started.pid);
}

void LocalTeam::watch(PollSet& polled) {
  for (auto& rank : ranks_) {
    for (auto& stream : rank.output.streams())
      if (stream.wanted() && (!share_.takes_output || share_.takes_output()))
        polled.add(stream.pipe.get(), POLLIN, [&](const pollfd&) { rank.output.read(stream); });
    if (!rank.ended) polled.add(rank.process->pidfd(), POLLIN, [&](const pollfd&) { take_end(rank); });
  }
  polled.add_all([&](std::vector<pollfd>& entries) { store_.append_polled(entries); },
                 [this](const pollfd& ready) {
                   store_.handle(ready);
                   report_dropped_clients();
                 });
}

void LocalTeam::report_dropped_clients() {
  for (const auto& dropped : store_.take_dropped())
    if (!dropped.reason.empty())
      messages_.push_back("rank " + std::to_string(dropped.client) +
                          " lost its connection to the key-value store: " + dropped.reason);
}

void LocalTeam::take_end(Rank& rank) {
  if (rank.ended) return;
  const auto how = rank.process->end();
  if (!how) return;
  rank.ended = true;
  rank.how = *how;
  if (rank.number == options_.debugged_rank) lent_terminal_.reset();
  ends_.push_back({.rank = rank.number,
                   .pid = rank.pid,
                   .how = *how,
                   .seconds = seconds_since(rank.started),
                   .peak_bytes = rank.process->peak_bytes(),
                   .memory = *how == kKilled ? memory_kills() : MemoryKills{}});
}

RanksObserved LocalTeam::observe(bool process_states, bool processor_times) {
  RanksObserved seen{.processor_times = processor_times};
  bool somebody_joins = false;
  for (const auto& rank : ranks_) {
    RankView& view = seen.ranks.emplace_back(view_of(rank));
    somebody_joins = somebody_joins || (!rank.ended && view.account.phase == RankStatus::Phase::kJoining);
    if (rank.ended || !process_states) continue;
    // The rank's own process may only have started the process that writes the page.
    view.process_state = process_state(rank.pid);
    if (view.process_state != 'T' && view.account.pid > 0) view.process_state = process_state(view.account.pid);
  }
  // It matters only then, and only for these ranks, because it inspects all processes.
  for (size_t i = 0; somebody_joins && i < ranks_.size(); ++i)
    if (RankView& view = seen.ranks[i]; view.ended && may_be_waited_for(view.account))
      view.outlived = group_lives(ranks_[i].pid) || (view.account.pid > 0 && view.account.pid != ranks_[i].pid &&
                                                     process_state(view.account.pid) != 0);
  if (processor_times) {
    std::vector<ProcessFamily> families;
    for (size_t i = 0; i < ranks_.size(); ++i)
      families.push_back({.group = ranks_[i].pid, .member = seen.ranks[i].account.pid});
    const auto times = lockstep::processor_times(families);
    for (size_t i = 0; i < ranks_.size(); ++i) seen.ranks[i].processor_time = times[i];
  }
  if (board_) {
    seen.stop_asked = board_->head().stop_asked.load() != 0;
    seen.stop_at = board_->head().stop_at.load();
    seen.resize_to = static_cast<int>(std::min<uint32_t>(board_->head().resize_to.load(), INT_MAX));
  }
  return seen;
}

void LocalTeam::ask_to_leave() {
  if (board_) board_->head().stop_asked.store(1);
}

void LocalTeam::stop(int signal) {
  if (board_) board_->head().stopping.store(1);
  signal_running(signal);
  signal_running(SIGCONT);  // a stopped process would not get the signal
}

void LocalTeam::kill() { signal_running(SIGKILL); }

void LocalTeam::signal_running(int signal) {
  for (auto& rank : ranks_)
    if (!rank.ended) rank.process->signal_group(signal);
}

void LocalTeam::finish() {
  for (auto& rank : ranks_) rank.process->signal_group(SIGKILL);
  for (auto& rank : ranks_) rank.output.finish();
}

void LocalTeam::await_end() {
  // SIGKILL takes a moment.
  const Deadline deadline(kGroupTimeout);
  for (auto& rank : ranks_)
    if (rank.ended) guard_.forget(rank.pid);
  for (auto& rank : ranks_)
    while (!rank.process->group_is_gone() && !deadline.passed())
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
  guard_.kill_strays(kGroupTimeout);
}

std::string LocalTeam::host_of(int) const { return host_name(); }

std::string LocalTeam::error_text(int rank) const {
  return folder_.empty() ? "" : read_error_file(error_file(folder_, rank));
}

/// Counted since the start. The kernel counts before it kills.
MemoryKills LocalTeam::memory_kills() const {
  MemoryKills now = count_memory_kills();
  now.count -= std::min(now.count, before_.count);
  return now;
}

}  // namespace lockstep
