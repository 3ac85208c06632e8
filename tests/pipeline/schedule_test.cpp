#include "pipeline/schedule.h"

#include <algorithm>
#include <numeric>

#include <gtest/gtest.h>

namespace lockstep {
namespace {

using Kind = PipelineAction::Kind;

TEST(OneForwardOneBackward, RunsEachMicroBatchOnceForwardsAndThenBackwards) {
  for (int stages = 1; stages <= 6; ++stages)
    for (int micro_batches = 1; micro_batches <= 13; ++micro_batches)
      for (int stage = 0; stage < stages; ++stage)
        for (int in_flight = 1; in_flight <= 3; ++in_flight) {
          int forwards = 0, backwards = 0, most = 0;
          for (const auto& [kind, micro_batch] : one_forward_one_backward(stage, stages, micro_batches, in_flight)) {
            EXPECT_EQ(micro_batch, (kind == Kind::kForward ? forwards : backwards)++);
            EXPECT_LE(backwards, forwards);
            most = std::max(most, forwards - backwards);
          }
          EXPECT_EQ(forwards, micro_batches);
          EXPECT_EQ(backwards, micro_batches);
          EXPECT_EQ(most, std::min(in_flight * (stages - 1 - stage) + 1, micro_batches));
        }
}

/// The time of a step if an action takes one, and a tensor is `travel` on its way.
int time_of(int stages, int micro_batches, int in_flight, int travel) {
  std::vector<std::vector<PipelineAction>> left;
  for (int stage = 0; stage < stages; ++stage)
    left.push_back(one_forward_one_backward(stage, stages, micro_batches, in_flight));
  const std::vector<int> never(static_cast<size_t>(micro_batches), 1 << 20);
  std::vector<std::vector<int>> forwards(left.size(), never), backwards(left.size(), never);  // when they were done
  std::vector<size_t> next(left.size(), 0);
  int time = 0;
  for (; next[0] < left[0].size() && time < 1000; ++time)
    for (size_t s = 0; s < left.size(); ++s) {
      if (next[s] == left[s].size()) continue;
      const auto [kind, number] = left[s][next[s]];
      const auto micro_batch = static_cast<size_t>(number);
      const bool is_forward = kind == Kind::kForward;
      const bool is_own = is_forward ? s == 0 : s + 1 == left.size();
      if (!is_own && (is_forward ? forwards[s - 1] : backwards[s + 1])[micro_batch] + travel > time) continue;
      ++next[s];
      (is_forward ? forwards : backwards)[s][micro_batch] = time + 1;
    }
  return time;
}

TEST(OneForwardOneBackward, WaitsForOneLessThanTheStagesMicroBatches) {
  for (int stages = 1; stages <= 5; ++stages)
    for (int micro_batches = stages; micro_batches <= 12; ++micro_batches)
      EXPECT_EQ(time_of(stages, micro_batches, 1, 0), 2 * (micro_batches + stages - 1));
}

TEST(OneForwardOneBackward, WithTwoInFlightHidesTensorsOnTheirWay) {
  for (int stages = 2; stages <= 5; ++stages)
    for (int micro_batches = 3 * stages; micro_batches <= 20; ++micro_batches) {
      // What remains are the ways of the first and the last micro-batch.
      EXPECT_EQ(time_of(stages, micro_batches, 2, 1), 2 * (micro_batches + stages - 1) + 2 * (stages - 1));
      EXPECT_GT(time_of(stages, micro_batches, 1, 1), time_of(stages, micro_batches, 2, 1));
    }
}

TEST(RowsOfMicroBatches, AreAsEqualAsPossible) {
  EXPECT_EQ(rows_of_micro_batches(13, 4), (std::vector<int64_t>{4, 3, 3, 3}));
  EXPECT_EQ(rows_of_micro_batches(8, 4), (std::vector<int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(rows_of_micro_batches(3, 3), (std::vector<int64_t>{1, 1, 1}));
}

}  // namespace
}  // namespace lockstep
