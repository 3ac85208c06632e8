#include "resize_command.h"

#include <signal.h>

#include <iostream>
#include <thread>

#include "base/clock.h"
#include "launch/launch_error.h"
#include "launch/option_values.h"
#include "launch/plan.h"
#include "running_run.h"

namespace lockstep {
namespace {

constexpr std::chrono::milliseconds kLookEvery(20);

[[noreturn]] void refuse(ExitCode code, const std::string& text) { throw LaunchError(code, text); }

void check(const RunningRun& run, int ranks) {
  if (!run.record.elastic)
    refuse(kExitRefusedInput, "the run was started without --elastic, so its number of ranks stays " +
                                  std::to_string(run.ranks()) + "; stop it and start it again with -n " +
                                  std::to_string(ranks) + ", or with --elastic MIN:MAX");
  if (const RankRange& range = *run.record.elastic; !range.contains(ranks))
    refuse(kExitBadCommandLine, "the run was started with --elastic " + std::to_string(range.min) + ":" +
                                    std::to_string(range.max) + "; it cannot have " + std::to_string(ranks) + " ranks");
  if (!run.board) refuse(kExitRefusedInput, "the ranks cannot be reached: " + run.board_failure);
}

/// Reads the run's record again, which is missing for a moment while ranks are replaced.
RunningRun look_again(const std::string& folder, const ProcessIdentity& launcher, const Deadline& deadline) {
  for (;;) {
    try {
      RunningRun run = find_run(folder);
      if (run.record.launcher.start_ticks == launcher.start_ticks) return run;
    } catch (const LaunchError&) {
      if (is_there(launcher) && !deadline.passed()) {
        std::this_thread::sleep_for(kLookEvery);
        continue;
      }
    }
    refuse(kExitRefusedInput, "the run has ended before its number of ranks could change");
  }
}

constexpr const char* kNeverAsks =
    "the program makes steps but does not call Context::stop_requested(), so it cannot be stopped between two of them; "
    "call it after each step, then save and leave (lockstep explain 61)";

/// Whether a rank asks for stops. Throws if the program has made steps without asking.
bool asks_for_stops(const RunningRun& run) {
  bool trains = false;
  for (int rank = 0; rank < run.ranks(); ++rank) {
    const RankStatus account = run.account_of(rank);
    if (account.stop_calls > 0) return true;
    trains = trains || account.steps > 1;  // it asks after the first step
  }
  if (trains) refuse(kExitRefusedInput, kNeverAsks);
  return false;
}

}  // namespace

ResizeCommand::ResizeCommand(CLI::App& app)
    : command_(
          app.add_subcommand("resize", "Let a run that was started with --elastic save, and continue with N ranks")) {
  command_->add_option("RUN", folder_, "The run's folder")->required();
  command_->add_option("N", ranks_, "The number of ranks")->required();
  command_->add_option("--timeout", timeout_, "Seconds to wait for it")->type_name("S")->capture_default_str();
}

int ResizeCommand::run() const {
  const int ranks = parse_number("N", ranks_, 1, kMaxRanks);
  const auto timeout = parse_seconds("--timeout", timeout_, false);
  RunningRun run = find_run(folder_);
  const ProcessIdentity launcher = run.record.launcher;
  check(run, ranks);
  const Deadline deadline(timeout);
  for (; run.ranks() != ranks; run = look_again(folder_, launcher, deadline)) {
    if (deadline.passed())
      refuse(kExitHang, "the run still has " + std::to_string(run.ranks()) + " ranks after " + timeout_ +
                            " s; `lockstep status` shows what they do; --timeout sets the time");
    // A request to ranks that were just replaced is lost, so it is repeated. SIGCONT makes the launcher look.
    if (run.board && asks_for_stops(run) &&
        run.board->head().resize_to.exchange(static_cast<uint32_t>(ranks)) != static_cast<uint32_t>(ranks))
      ::kill(launcher.pid, SIGCONT);
    std::this_thread::sleep_for(kLookEvery);
  }
  std::cout << "the run has " << ranks << (ranks == 1 ? " rank" : " ranks") << std::endl;
  return std::cout.good() ? kExitOk : kExitStorage;
}

}  // namespace lockstep
