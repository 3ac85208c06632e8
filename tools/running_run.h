#pragma once

#include <optional>
#include <string>
#include <vector>

#include "launch/run_record.h"
#include "rank_page/rank_board.h"

namespace lockstep {

/// A run in progress, found by its folder.
struct RunningRun {
  RunRecord::Contents record;
  std::optional<RankBoard> board;
  std::string board_failure;  ///< why there is none

  int ranks() const { return static_cast<int>(record.ranks.size()); }
  RankStatus account_of(int rank) const { return board ? board->page(rank).read(ranks()) : RankStatus{}; }
};

/// Throws LaunchError (refused input) if no run is in progress in `folder`.
RunningRun find_run(const std::string& folder);

/// The folders of this user's runs whose launchers run on this machine, sorted. A launcher keeps the lock of its run's
/// folder open, so /proc shows it without any registration.
std::vector<std::string> folders_of_running_runs();

}  // namespace lockstep
