#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/diagnosis/failure_report.h"
#include "launch/diagnosis/stall.h"
#include "launch/process/team.h"

namespace lockstep {

/// The folder for states of this run that must not go to their own place; empty: none.
std::string kept_folder_in(const std::string& run_folder);

/// Tracks the training state that the ranks of all starts have left. When the run gives up, writes to disk the state
/// that only the launcher's memory holds, because the memory ends with the launcher.
class StateKeeper {
 public:
  /// `memory` is StateMemory's descriptor, if `places` is null. `run_folder` may be empty.
  StateKeeper(int memory, RankPlaces* places, const std::string& run_folder);

  /// Records the pages of a start that has ended with this code. Later starts may die before they have read as much.
  void note(const std::vector<RankView>& ranks, int exit_code);
  /// Called when the run gives up with `exit_code`. A state saved by a start whose replicas diverged, or by a later one
  /// that continued from it, goes to the run's folder and not to its own place, so that resume() does not silently
  /// continue from it.
  /// REQUIRES: no process of the run is left.
  void keep(int exit_code);
  const StateLeft& left() const { return left_; }

 private:
  const int memory_;
  RankPlaces* const places_;
  const std::string folder_;  // for states that must not go to their own place
  StateLeft left_;
  std::optional<int64_t> suspect_from_;  ///< states of this step and later ones come from a start that diverged
};

}  // namespace lockstep
