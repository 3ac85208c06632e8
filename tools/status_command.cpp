#include "status_command.h"

#include <algorithm>
#include <cinttypes>
#include <iostream>
#include <map>
#include <optional>

#include "base/clock.h"
#include "base/rank_names.h"
#include "base/text.h"
#include "capture.h"
#include "hosts/launch_command.h"
#include "launch/launch_error.h"
#include "launch/plan.h"
#include "launch/process/own_program.h"
#include "launch/process/process_table.h"
#include "report/starts.h"
#include "report/text.h"
#include "running_run.h"

namespace lockstep {
namespace {

/// For the stacks of one rank, and the connection to its machine.
constexpr std::chrono::seconds kRemoteTimeout(130);
constexpr size_t kShownStarts = 6;  ///< the last ones, including the current one

/// The process that computes: the one that writes the page, if the rank's own process only started it (a shell).
pid_t process_of(const RunningRun& run, int rank, const RankStatus& account) {
  const auto index = static_cast<size_t>(rank);
  const bool may_live = !run.record.hosts[index].empty() || process_state(account.pid) != 0;
  return account.pid > 0 && may_live ? account.pid : run.record.ranks[index].pid;
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

/// The wait of another thread than the one whose operation ran last; empty if there is none.
std::string other_wait(const RankStatus& account) {
  const uint64_t group = account.awaited.group, sequence = account.awaited.sequence;
  const auto& operation = account.operation;
  if (!account.waiting || group == 0 || (operation.group_id == group && operation.sequence == sequence)) return "";
  std::string text = ", a thread waits in operation #" + std::to_string(sequence);
  for (const RankStatus::Group& one : account.groups)
    if (one.id == group) text += " in " + printable(one.text());
  return text;
}

std::string describe(const RankStatus& account) {
  if (account.pid == 0) return "has not joined (it is still starting, or does not use Lockstep)";
  std::string text = "step " + std::to_string(account.steps);
  const auto& operation = account.operation;
  if (account.phase == RankStatus::Phase::kJoining) text += ", waits for all ranks to join";
  if (account.phase == RankStatus::Phase::kLeft) text += ", has left";
  if (account.phase == RankStatus::Phase::kLeftByException) text += ", left with an exception";
  if (!operation.kind.empty()) {
    text += (operation.running ? ", in " : ", last ") + printable(operation.text());
    if (operation.running) text += formatted(" for %.1f s", seconds_since(operation.started));
  }
  text += other_wait(account);
  if (account.heartbeats > 0)
    text += formatted(", %" PRIu64 " heartbeats, the last %.1f s ago", account.heartbeats,
                      seconds_since(account.last_heartbeat));
  std::vector<int> awaited;
  for (int rank = 0; rank < 64; ++rank)
    if ((operation.running || account.waiting) && (account.waits_for >> rank & 1) != 0) awaited.push_back(rank);
  if (!awaited.empty()) text += ", waits for rank " + list_ranks(awaited);
  if (account.failure != RankFailure::kNone) text += "\n        failed: " + printable(account.failure_text);
  return text;
}

/// The steps of all starts, including the current ranks'; empty before a restart.
std::string progress_text(const RunningRun& run, const std::string& folder) {
  std::vector<TeamData> teams = starts_in(folder);
  if (run.record.restarts == 0 || teams.empty()) return "";
  // Until the ranks have made a step, their starting point is unknown.
  TeamData now{.ranks = run.ranks(), .first_step = teams.back().end_step()};
  for (int rank = 0; rank < run.ranks(); ++rank) now.steps = std::max(now.steps, run.account_of(rank).steps);
  if (now.steps > 0) now.first_step = run.account_of(0).first_step;
  teams.push_back(now);
  count_lost(teams);
  std::string text = "start " + std::to_string(run.record.restarts + 1) + "; before it: ";
  for (size_t i = teams.size() > kShownStarts ? teams.size() - kShownStarts : 0; i + 1 < teams.size(); ++i)
    text += (text.ends_with(": ") ? "" : ", ") + counted(teams[i].ranks, "rank") + " (" +
            counted(teams[i].steps, "step") + ", " + how_it_ended(teams[i]) + ")";
  const EffectiveProgress progress = effective_progress(teams);
  if (progress.made == 0) return text + "\n";
  return text + "\neffective progress: " + std::to_string(progress.kept) + " of " + counted(progress.made, "step") +
         " made were kept, " + percent(progress.share()) + "\n";
}

void show_status(const RunningRun& run, const std::string& folder) {
  std::cout << "launcher " << run.record.launcher.pid << ", " << run.record.ranks.size()
            << (run.record.ranks.size() == 1 ? " rank" : " ranks");
  if (const auto& range = run.record.elastic)
    std::cout << ", of " << range->min << " to " << range->max << " that it may have";
  std::cout << "\n";
  std::cout << progress_text(run, folder);
  if (!run.board) std::cout << "the state of the ranks is not known: " << run.board_failure << "\n";
  for (int rank = 0; rank < static_cast<int>(run.record.ranks.size()); ++rank) {
    const RankStatus account = run.account_of(rank);
    const std::string& host = run.record.hosts[static_cast<size_t>(rank)];
    const pid_t pid = process_of(run, rank, account);
    std::cout << "rank " << rank << "  process " << pid << " "
              << (host.empty() ? name_of(process_state(pid)) : "on " + printable(host));
    if (run.board) std::cout << "  " << describe(account);
    std::cout << "\n";
  }
}

/// The run's folder and progress; "of 2 to 4 ranks" is what --elastic allows.
void show_all() {
  size_t shown = 0;
  for (const std::string& folder : folders_of_running_runs()) {
    std::optional<RunningRun> run;
    try {
      run = find_run(folder);
    } catch (const LaunchError&) {
      continue;  // it has ended meanwhile
    }
    int64_t step = 0;
    for (int rank = 0; rank < run->ranks(); ++rank) {
      const RankStatus account = run->account_of(rank);
      step = std::max(step, account.first_step + account.steps);
    }
    std::cout << printable(folder) << "  launcher " << run->record.launcher.pid << ", "
              << counted(run->ranks(), "rank");
    if (const auto& range = run->record.elastic) std::cout << " (" << range->min << " to " << range->max << ")";
    std::cout << (run->board ? ", step " + std::to_string(step) : "");
    if (run->record.restarts > 0) std::cout << ", start " << run->record.restarts + 1;
    std::cout << "\n";
    ++shown;
  }
  if (shown == 0) std::cout << "this user has no active run on this machine\n";
}

/// Prints them on the rank's machine, by a command started there as the agents were.
bool print_stacks_on(const std::string& host, const RunningRun& run, pid_t pid) {
  const std::vector<std::string> agent = {own_program(), "agent", "--stacks", std::to_string(pid)};
  if (run.record.launch_command.empty()) {
    std::cout << "to see them, run on that machine: " << hosts::command_text(agent) << "\n";
    return false;
  }
  const Captured said = capture(hosts::launch_words(run.record.launch_command, host, agent), kRemoteTimeout);
  std::cout << said.out;
  if (said.exit_code != 0) std::cout << (said.failure.empty() ? printable(said.err) : said.failure) << "\n";
  return said.exit_code == 0;
}

int show_stacks(const RunningRun& run) {
  bool complete = true;
  std::cout << "Each rank is stopped while its stacks are read, one after the other, for " << kLongestStop.count()
            << " s at most.\n";
  for (int rank = 0; rank < static_cast<int>(run.record.ranks.size()); ++rank) {
    const RankStatus account = run.account_of(rank);
    const std::string& host = run.record.hosts[static_cast<size_t>(rank)];
    const pid_t pid = process_of(run, rank, account);
    std::cout << "=== rank " << rank << ", process " << pid << " "
              << (host.empty() ? name_of(process_state(pid)) : "on " + printable(host)) << ", " << describe(account)
              << std::endl;
    complete = (host.empty() ? print_stacks(pid) : print_stacks_on(host, run, pid)) && complete;
  }
  return complete ? kExitOk : kExitRefusedInput;
}

}  // namespace

StatusCommand::StatusCommand(CLI::App& app)
    : status_(app.add_subcommand("status", "Show what each rank of a run is doing now, and which ranks it waits for")),
      stacks_(app.add_subcommand("stacks", "The same, with the stacks of all threads (uses gdb or eu-stack)")) {
  for (CLI::App* command : {status_, stacks_}) command->add_option("RUN", folder_, "The run's folder");
  status_->add_flag("--all", all_, "A line for each active run of this user that was started on this machine");
}

int StatusCommand::run() const {
  if (all_ && !folder_.empty())
    throw LaunchError(kExitBadCommandLine, "`lockstep status` takes a run's folder or --all, not both");
  if (all_) {
    show_all();
    return std::cout.flush() ? kExitOk : kExitStorage;
  }
  if (folder_.empty())
    throw LaunchError(kExitBadCommandLine,
                      "no run is given; give its folder (`lockstep status --all` lists the folders of active runs)");
  if (has_rounds(folder_)) {
    if (stacks_->parsed())
      throw LaunchError(kExitBadCommandLine,
                        "the run is one of --islands, whose machines are runs of their own; give the "
                        "folder of one, " +
                            folder_ + "/machine_0, on that machine");
    std::cout << rounds_text(folder_);
    return std::cout.flush() ? kExitOk : kExitStorage;
  }
  const RunningRun run = find_run(folder_);
  int code = kExitOk;
  if (stacks_->parsed())
    code = show_stacks(run);
  else
    show_status(run, folder_);
  return std::cout.flush() ? code : kExitStorage;
}

}  // namespace lockstep
