#pragma once

#include <cstdint>
#include <optional>
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

  /// Records the pages of a start that has ended with this code. Later starts may die before they have read as much.
  void note(const std::vector<RankView>& ranks, int exit_code);
  /// The run gives up, and none of its processes is left. `exit_code`: its own. What was saved by a start whose
  /// replicas diverged, or by one that went on from that, goes into the run's folder and not where it belongs, because
  /// resume() must not go on from it unseen.
  void keep(int exit_code);
  const StateLeft& left() const { return left_; }

 private:
  const int memory_;
  RankPlaces* const places_;
  const std::string folder_;  // for states that do not go where they belong
  StateLeft left_;
  std::optional<int64_t> suspect_from_;  ///< states of this step and later ones come from a start that diverged
};

}  // namespace lockstep
