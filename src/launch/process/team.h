#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/output/display.h"
#include "launch/output/rank_output.h"
#include "launch/plan.h"
#include "launch/process/debugger.h"
#include "launch/process/guard.h"
#include "launch/process/process.h"
#include "launch/process/rank_command.h"
#include "launch/process/terminal_input.h"
#include "launch/run_record.h"
#include "launch/run_state.h"
#include "rank_page/rank_board.h"
#include "rendezvous/key_value_server.h"

namespace lockstep {

/// One rank's process and its output.
struct Rank {
  Rank(int rank, std::string log_path) : number(rank), output(rank, std::move(log_path)) {}

  const int number;
  std::optional<Process> process;
  RankOutput output;
  bool ended = false;
  ProcessEnd how;  ///< once it has ended
  Clock::time_point started;
};

/// What all starts of a run have in common. Outlives the teams.
struct TeamSetup {
  const LaunchOptions& options;
  const EnvironmentBlock& environment;       ///< the launcher's own
  const std::vector<RankCommand>& commands;  ///< by rank
  const std::string folder;                  ///< of the run
  const LauncherSettings& settings;
  const Guard& guard;
  Display& display;
  TerminalInput& input;  ///< becomes rank 0's
  int master_port;
  const std::string run_id;
};

/// The ranks of one start and what belongs to it alone: processes, key-value store, board of pages. Passive:
/// the owner polls the descriptors and calls.
class Team {
 public:
  /// Starts all ranks. Throws LaunchError when that cannot be done.
  Team(const TeamSetup& setup, int restarts);

  std::deque<Rank>& ranks() { return ranks_; }
  const Rank& rank(int number) const { return ranks_[static_cast<size_t>(number)]; }
  KeyValueServer& store() { return store_; }
  /// Why there is no board of pages; empty if there is one.
  const std::string& board_failure() const { return board_failure_; }
  bool has_board() const { return board_.has_value(); }

  /// How a rank ended; empty while it runs, and after the first call that told it.
  std::optional<RankEnd> take_end(Rank& rank);
  /// What is known of the ranks now. `process_states`, `processor_times`: read from /proc, too.
  RanksObserved observe(bool process_states, bool processor_times) const;

  /// Through the board: the ranks choose a step after which all leave.
  void ask_to_leave();
  /// For `lockstep status`, which finds the run by its folder.
  RunRecord::Contents record() const;

  /// Signals all running ranks to end.
  void stop(int signal);
  void kill();
  /// Kills what the ranks left behind in their process groups, and takes the rest of their output.
  void finish();
  /// After finish(): waits until nothing is left, for a limited time.
  void await_end();

  /// The file where a rank may write what ended it.
  static std::string error_file(const std::string& folder, int rank);

 private:
  void start_rank(const TeamSetup& setup, int rank, int restarts);
  void signal_running(int signal);

  const LaunchOptions& options_;
  const Guard& guard_;
  KeyValueServer store_;
  std::optional<RankBoard> board_;
  std::string board_failure_;
  std::optional<LentTerminal> lent_terminal_;  // to the debugger
  std::deque<Rank> ranks_;                     // a deque, because Rank cannot move
};

}  // namespace lockstep
