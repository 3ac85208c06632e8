#include "status_command.h"

#include <fcntl.h>

#include <array>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/printable.h"
#include "capture.h"
#include "launch/diagnosis/verdict.h"
#include "launch/launch_error.h"
#include "launch/plan.h"
#include "launch/process/process_table.h"
#include "launch/run_record.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kStackTimeout(60);

/// A run that is going on, found by its folder.
struct Run {
  RunRecord::Contents record;
  std::optional<RankBoard> board;
  std::string board_failure;
};

Run find_run(const std::string& folder) {
  Run run;
  try {
    run.record = RunRecord::read(folder);
  } catch (const Error& error) {
    throw LaunchError(kExitRefusedInput, error.what());
  }
  const pid_t launcher = run.record.launcher.pid;
  if (!is_there(run.record.launcher))
    throw LaunchError(kExitRefusedInput, "the run in " + folder + " is over: its launcher, process " +
                                             std::to_string(launcher) + ", died without cleaning up");
  if (run.record.board_fd < 0) {
    run.board_failure = "its ranks have no pages";
    return run;
  }
  const std::string path = "/proc/" + std::to_string(launcher) + "/fd/" + std::to_string(run.record.board_fd);
  const int fd = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0)
    run.board_failure =
        path + ": " + std::strerror(errno) + (errno == EACCES ? "; ask as the user who started it" : "");
  else if (run.board = RankBoard::open(fd, static_cast<int>(run.record.ranks.size())); !run.board)
    run.board_failure = path + " was written by another version of Lockstep";
  return run;
}

RankStatus account_of(const Run& run, int rank) {
  return run.board ? run.board->page(rank).read(static_cast<int>(run.record.ranks.size())) : RankStatus{};
}

/// The process that computes: the one that writes the page, where the rank's own only started it (a shell).
pid_t process_of(const Run& run, int rank, const RankStatus& account) {
  return account.pid > 0 && process_state(account.pid) != 0 ? account.pid
                                                            : run.record.ranks[static_cast<size_t>(rank)].pid;
}

const char* name_of(char state) {
  static const std::map<char, const char*> names = {{'R', "running"},
                                                    {'S', "sleeping"},
                                                    {'D', "waiting for a disk"},
                                                    {'T', "STOPPED"},
                                                    {'t', "in a debugger"},
                                                    {'Z', "ended"},
                                                    {'X', "ended"},
                                                    {0, "ended"}};
  const auto name = names.find(state);
  return name == names.end() ? "?" : name->second;
}

std::string describe(const RankStatus& account) {
  if (account.pid == 0) return "has not joined (it is still starting, or does not use Lockstep)";
  std::string text = "step " + std::to_string(account.steps);
  const auto& operation = account.operation;
  if (account.phase == RankStatus::Phase::kJoining) text += ", waits for all ranks to join";
  if (account.phase == RankStatus::Phase::kLeft) text += ", has left";
  if (account.phase == RankStatus::Phase::kLeftByException) text += ", left with an exception";
  if (!operation.kind.empty()) {
    std::array<char, 32> seconds{};
    std::snprintf(seconds.data(), seconds.size(), "%.1f s", seconds_since(operation.started));
    text += (operation.running ? ", in " : ", last ") + printable(operation.text());
    if (operation.running) text += std::string(" for ") + seconds.data();
  }
  if (account.heartbeats > 0) {
    std::array<char, 64> beats{};
    std::snprintf(beats.data(), beats.size(), ", %" PRIu64 " heartbeats, the last %.1f s ago", account.heartbeats,
                  seconds_since(account.last_heartbeat));
    text += beats.data();
  }
  std::vector<int> awaited;
  for (int rank = 0; rank < 64; ++rank)
    if (operation.running && (account.waits_for >> rank & 1) != 0) awaited.push_back(rank);
  if (!awaited.empty()) text += ", waits for rank " + list_ranks(awaited);
  if (account.failure != RankFailure::kNone) text += "\n        failed: " + printable(account.failure_text);
  return text;
}

void show_status(const Run& run) {
  std::cout << "launcher " << run.record.launcher.pid << ", " << run.record.ranks.size()
            << (run.record.ranks.size() == 1 ? " rank\n" : " ranks\n");
  if (!run.board) std::cout << "what the ranks do is not known: " << run.board_failure << "\n";
  for (int rank = 0; rank < static_cast<int>(run.record.ranks.size()); ++rank) {
    const RankStatus account = account_of(run, rank);
    const pid_t pid = process_of(run, rank, account);
    std::cout << "rank " << rank << "  process " << pid << " " << name_of(process_state(pid));
    if (run.board) std::cout << "  " << describe(account);
    std::cout << "\n";
  }
}

/// The command that prints the stacks of a running process without asking anything; empty where there is none.
std::vector<std::string> stack_printer(pid_t pid) {
  const std::string number = std::to_string(pid);
  if (capture({"eu-stack", "--version"}, std::chrono::seconds(5)).exit_code == 0)
    return {"eu-stack", "-n", "40", "-p", number};
  if (capture({"gdb", "--version"}, std::chrono::seconds(5)).exit_code == 0)
    return {"gdb", "-nx", "-batch", "-p", number, "-ex", "thread apply all backtrace 40"};
  return {};
}

int show_stacks(const Run& run) {
  bool complete = true;
  for (int rank = 0; rank < static_cast<int>(run.record.ranks.size()); ++rank) {
    const RankStatus account = account_of(run, rank);
    const pid_t pid = process_of(run, rank, account);
    std::cout << "=== rank " << rank << ", process " << pid << " " << name_of(process_state(pid)) << ", "
              << describe(account) << "\n";
    const auto printer = stack_printer(pid);
    if (printer.empty())
      throw LaunchError(kExitNotStarted,
                        "neither eu-stack nor gdb is in PATH; install one (Debian: apt-get install gdb)");
    const Captured said = capture(printer, kStackTimeout);
    const bool refused = (said.err + said.out).find("ot permitted") != std::string::npos;
    if (refused)
      std::cout
          << "the kernel does not permit a look into it: run this as its user with kernel.yama.ptrace_scope=0, or as "
             "root; in a container have CAP_SYS_PTRACE\n";
    else if (said.exit_code != 0)
      std::cout << printer[0] << " failed: " << (said.failure.empty() ? said.err : said.failure) << "\n";
    else
      std::cout << said.out;
    complete = complete && !refused && said.exit_code == 0;
  }
  return complete ? kExitOk : kExitRefusedInput;
}

}  // namespace

StatusCommand::StatusCommand(CLI::App& app)
    : status_(app.add_subcommand("status", "Show what each rank of a run is doing now, and which ranks it waits for")),
      stacks_(app.add_subcommand("stacks", "The same, with the stacks of all threads (uses eu-stack or gdb)")) {
  for (CLI::App* command : {status_, stacks_}) command->add_option("RUN", folder_, "The run's folder")->required();
}

int StatusCommand::run() const {
  const Run run = find_run(folder_);
  int code = kExitOk;
  if (stacks_->parsed())
    code = show_stacks(run);
  else
    show_status(run);
  return std::cout.flush() ? code : kExitStorage;
}

}  // namespace lockstep
