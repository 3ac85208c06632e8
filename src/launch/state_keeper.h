#pragma once

#include <string>
#include <vector>

#include "launch/diagnosis/failure_report.h"
#include "launch/diagnosis/stall.h"
#include "launch/process/team.h"

namespace lockstep {

/// Where a state of the run in this folder goes that does not go where it belongs; empty: nowhere.
std::string kept_folder_in(const std::string& run_folder);

/// Knows what the ranks of all starts have left of their training, and writes what only the launcher's memory holds to
/// disk when the run gives up: the memory ends with the launcher.
class StateKeeper {
 public:
  /// `memory`: of StateMemory, where `places` is null. `run_folder`: empty where there is none.
  StateKeeper(int memory, RankPlaces* places, const std::string& run_folder);

  /// What the pages of a start say when it has ended. Later starts may die before they have read as much.
  void note(const std::vector<RankView>& ranks);
  /// The run gives up, and none of its processes is left. `exit_code`: its own.
  void keep(int exit_code);
  const StateLeft& left() const { return left_; }

 private:
  const int memory_;
  RankPlaces* const places_;
  const std::string folder_;  // for states that do not go where they belong
  StateLeft left_;
};

}  // namespace lockstep
