#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "checkpoint/memory/kept_state.h"
#include "launch/output/display.h"
#include "launch/output/rank_output.h"
#include "launch/plan.h"
#include "launch/poll_set.h"
#include "launch/process/guard.h"
#include "launch/process/process.h"
#include "launch/process/rank_command.h"
#include "launch/process/terminal_input.h"
#include "launch/run_record.h"
#include "launch/run_state.h"
#include "rank_page/rank_board.h"

namespace lockstep {

/// One rank: its process, on any machine, and its output.
struct Rank {
  Rank(int rank, std::string log_path) : number(rank), output(rank, std::move(log_path)) {}

  const int number;
  std::optional<Process> process;  ///< empty: it runs on another machine
  pid_t pid = 0;
  RankOutput output;
  bool ended = false;
  ProcessEnd how;  ///< once it has ended
  Clock::time_point started;
};

/// Settings common to all starts of a run. Outlives the teams.
struct TeamSetup {
  const LaunchOptions& options;
  const EnvironmentBlock& environment;       ///< the launcher's own
  const std::vector<RankCommand>& commands;  ///< of the ranks of this machine, in their order
  const std::string folder;                  ///< of the run
  const LauncherSettings& settings;
  const Guard& guard;
  Display& display;
  TerminalInput& input;  ///< becomes rank 0's
  int memory_fd;         ///< of StateMemory; -1: none
  int master_port;
  const std::string run_id;
};

/// The ranks of one start and their own resources. Passive: the owner polls the descriptors that watch() adds, calls
/// tick() after every turn, and takes the events.
class Team {
 public:
  virtual ~Team() = default;
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;

  std::deque<Rank>& ranks() { return ranks_; }
  const Rank& rank(int number) const { return ranks_[static_cast<size_t>(number - ranks_.front().number)]; }
  /// The reason why there is no board of pages; empty if there is one.
  const std::string& board_failure() const { return board_failure_; }
  bool has_board() const { return board_.has_value(); }

  virtual void watch(PollSet& polled) = 0;
  /// The next time at which tick() has work; empty if none.
  virtual std::optional<Clock::time_point> due() const { return std::nullopt; }
  virtual void tick() {}
  /// The ranks that have ended since the last call, in the order of observation.
  std::vector<RankEnd> take_ends() { return std::exchange(ends_, {}); }
  /// Returns and clears the messages for the user.
  std::vector<std::string> take_messages() { return std::exchange(messages_, {}); }
  /// A signal to the run that arrived at another process; 0: none.
  int take_signal() { return std::exchange(signal_, 0); }

  /// Lost output, one line each, after finish().
  std::vector<std::string> losses() const;
  /// Marks the logs before a restarted program continues in them.
  void mark_logs(const std::string& mark) const;

  /// The current state of the ranks. `process_states`, `processor_times`: also read these from /proc.
  virtual RanksObserved observe(bool process_states, bool processor_times) = 0;

  /// Asks the ranks, through the board, to choose a step after which all leave.
  virtual void ask_to_leave() = 0;
  /// For `lockstep status`, which finds the run by its folder.
  RunRecord::Contents record() const;

  /// Signals all running ranks to end.
  virtual void stop(int signal) = 0;
  virtual void kill() = 0;
  /// Kills leftovers in the ranks' process groups, and reads the rest of their output.
  virtual void finish() = 0;
  /// Waits, for a limited time, until no process is left. Called after finish().
  virtual void await_end() = 0;

  /// The machine that the rank runs on.
  virtual std::string host_of(int rank) const = 0;
  /// The contents of the rank's error file.
  virtual std::string error_text(int rank) const = 0;

  /// The file to which a rank may write its fatal error.
  static std::string error_file(const std::string& folder, int rank);
  static std::string log_file(const std::string& folder, int rank);

 protected:
  Team() = default;
  RankStatus account_of(const Rank& rank) const;
  RankView view_of(const Rank& rank) const;

  std::optional<RankBoard> board_;
  std::string board_failure_;
  std::deque<Rank> ranks_;  // a deque, because Rank cannot move
  std::vector<RankEnd> ends_;
  std::vector<std::string> messages_;
  int signal_ = 0;
};

/// Starts a run's ranks in other places than processes of the launcher.
class RankPlaces {
 public:
  virtual ~RankPlaces() = default;
  /// Starts the ranks: in a first start as many as there are places, later setup.options.ranks of them, if the run is
  /// elastic. Throws LaunchError if that fails.
  virtual std::unique_ptr<Team> start(const TeamSetup& setup, int restarts) = 0;
  /// If the next start has fewer ranks, drops the place of this rank of the last start first.
  virtual void leave_out(int rank) = 0;
  /// The template of the command that starts a program on another machine; empty if none.
  virtual std::string launch_command() const = 0;
  /// keep_state() on the machines that hold the states.
  /// REQUIRES: no rank runs, and end() has not been called.
  virtual KeptState keep_state(const std::string& other_folder, bool is_sound) = 0;
  /// Called once, after the last start, when the run is over or could not continue.
  virtual void end(int exit_code) = 0;
};

}  // namespace lockstep
