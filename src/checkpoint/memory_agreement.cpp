#include "checkpoint/memory_agreement.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>

#include "base/error.h"
#include "base/rank_names.h"
#include "checkpoint/state_comparison.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

enum Column { kProblem, kStep, kFolder, kLayout, kSamples, kColumns };

at::Tensor numbers_of(const MemorySave& mine) {
  const at::Tensor numbers = at::zeros({kColumns}, at::kLong);
  int64_t* number = numbers.mutable_data_ptr<int64_t>();
  number[kStep] = mine.step;
  number[kProblem] = mine.problem.empty() ? 0 : 1;
  if (!mine.problem.empty()) return numbers;
  number[kFolder] = static_cast<int64_t>(std::hash<std::string>()(mine.folder));
  number[kLayout] = static_cast<int64_t>(mine.layout);
  if (mine.sampled != nullptr)
    number[kSamples] = static_cast<int64_t>(mine.sampled->hash_of_samples(static_cast<uint64_t>(mine.step)));
  return numbers;
}

[[noreturn]] void throw_problems(const std::string& save, const std::vector<std::string>& problems) {
  const auto first = std::find_if(problems.begin(), problems.end(), [](const auto& text) { return !text.empty(); });
  throw Error(save + *first + " (on " + ranks_with(problems, *first) + ")");
}

}  // namespace

MemorySaveComparison::MemorySaveComparison(const Group& group, MemorySave mine)
    : group_(group), mine_(std::move(mine)) {
  if (group_.world_size() == 1) return;
  numbers_ = numbers_of(mine_);
  all_ = at::empty({group_.world_size(), kColumns}, at::kLong);
  work_ = group_.all_gather_async(all_, numbers_);
}

void MemorySaveComparison::check() {
  const std::string save = "the state of step " + std::to_string(mine_.step) + " cannot be saved to memory: ";
  if (group_.world_size() == 1 && !mine_.problem.empty()) throw Error(save + mine_.problem);
  if (!work_) return;
  std::exchange(work_, std::nullopt)->wait();
  const int64_t* numbers = all_.const_data_ptr<int64_t>();
  const auto differs = [&](Column column) {
    for (int rank = 1; rank < group_.world_size(); ++rank)
      if (numbers[rank * kColumns + column] != numbers[column]) return true;
    return false;
  };
  if (differs(kStep)) {
    std::vector<std::string> steps;
    for (int rank = 0; rank < group_.world_size(); ++rank)
      steps.push_back(std::to_string(numbers[rank * kColumns + kStep]));
    throw Error(save + difference_of_calls("ranks save different steps", steps));
  }
  if (differs(kProblem) || numbers[kProblem] != 0) throw_problems(save, group_.all_gather_bytes(mine_.problem));
  if (differs(kFolder))
    throw Error(save + difference_of_calls("ranks save into different folders", group_.all_gather_bytes(mine_.folder)));
  if (differs(kLayout) || differs(kSamples)) compare_memory_states(group_, *mine_.common);
}

void compare_memory_states(const Group& group, const c10::impl::GenericDict& common) {
  if (group.world_size() == 1) return;
  const std::string difference =
      difference_of_lines(group.all_gather_bytes(lines_of_state(common, /*in_slices=*/true)));
  if (difference.empty()) return;
  own_page().fail(RankFailure::kDiverged, -1, difference);
  throw Error("a checkpoint in memory holds one state for all ranks, so it must be the same on all of them: " +
              difference + ". If ranks may differ in a part, add it with Scope::kEachRank or Scope::kRankZero");
}

}  // namespace lockstep
