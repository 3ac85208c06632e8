#include "launch/state_keeper.h"

#include <algorithm>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

/// The step whose checkpoint is whole in memory; -1 without one. Each rank has kept its part of its last save and of
/// the one before, and a rank that lags is behind by one.
int64_t whole_step(const std::vector<RankView>& ranks) {
  const auto behind = std::min_element(ranks.begin(), ranks.end(), [](const RankView& a, const RankView& b) {
    return a.account.memory_step < b.account.memory_step;
  });
  return behind == ranks.end() ? -1 : behind->account.memory_step;
}

}  // namespace

std::string kept_folder_in(const std::string& run_folder) {
  return run_folder.empty() ? "" : run_folder + "/kept_state";
}

StateKeeper::StateKeeper(int memory, RankPlaces* places, const std::string& run_folder)
    : memory_(memory), places_(places), folder_(kept_folder_in(run_folder)) {}

void StateKeeper::note(const std::vector<RankView>& ranks, int exit_code) {
  for (const RankView& rank : ranks) {
    if (rank.account.checkpoint.empty() || rank.account.checkpoint_step < left_.step) continue;
    left_.path = rank.account.checkpoint;
    left_.step = rank.account.checkpoint_step;
  }
  const int64_t now = places_ == nullptr ? newest_step_in_memory(memory_) : whole_step(ranks);
  left_.in_memory = std::max(left_.in_memory, now);
  if (ranks.empty()) return;
  const int64_t first = ranks.front().account.first_step;
  // A start that continued from an earlier state has replaced the suspect state by its own saves.
  if (suspect_from_ && first < *suspect_from_ && whole_step(ranks) > first) suspect_from_.reset();
  if (exit_code == kExitDiverged) suspect_from_ = std::min(suspect_from_.value_or(first + 1), first + 1);
  left_.suspect = suspect_from_ && left_.in_memory >= *suspect_from_;
}

void StateKeeper::keep(int exit_code) {
  if (left_.written) return;
  const bool is_sound = exit_code != kExitDiverged && !left_.suspect;
  const KeptState kept =
      places_ != nullptr ? places_->keep_state(folder_, is_sound) : keep_state(memory_, folder_, is_sound);
  left_.in_memory = std::max(left_.in_memory, kept.step);
  left_.problem = kept.problem;
  if (kept.path.empty()) return;
  left_.path = kept.path;
  left_.step = kept.path_step;
  left_.written = kept.written;
}

}  // namespace lockstep
