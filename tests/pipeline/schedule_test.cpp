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
      for (int stage = 0; stage < stages; ++stage) {
        int forwards = 0, backwards = 0, most = 0;
        for (const auto& [kind, micro_batch] : one_forward_one_backward(stage, stages, micro_batches)) {
          EXPECT_EQ(micro_batch, (kind == Kind::kForward ? forwards : backwards)++);
          EXPECT_LE(backwards, forwards);
          most = std::max(most, forwards - backwards);
        }
        EXPECT_EQ(forwards, micro_batches);
        EXPECT_EQ(backwards, micro_batches);
        EXPECT_EQ(most, std::min(stages - stage, micro_batches));
      }
}

/// All stages take one unit of time for an action: the step takes what the schedule's authors give.
TEST(OneForwardOneBackward, WaitsForOneLessThanTheStagesMicroBatches) {
  for (int stages = 1; stages <= 5; ++stages)
    for (int micro_batches = stages; micro_batches <= 12; ++micro_batches) {
      std::vector<std::vector<PipelineAction>> left;
      for (int stage = 0; stage < stages; ++stage)
        left.push_back(one_forward_one_backward(stage, stages, micro_batches));
      std::vector<size_t> next(left.size(), 0);
      std::vector<int> forwards(left.size(), 0), backwards(left.size(), 0);  // done
      int time = 0;
      const auto unfinished = [&] { return next[0] < left[0].size(); };
      while (unfinished() && time < 1000) {
        const auto forwards_before = forwards, backwards_before = backwards;
        for (size_t s = 0; s < left.size(); ++s) {
          if (next[s] == left[s].size()) continue;
          const auto [kind, micro_batch] = left[s][next[s]];
          const bool is_forward = kind == Kind::kForward;
          const bool can = is_forward ? s == 0 || forwards_before[s - 1] > micro_batch
                                      : s + 1 == left.size() || backwards_before[s + 1] > micro_batch;
          if (!can) continue;
          ++next[s];
          ++(is_forward ? forwards : backwards)[s];
        }
        ++time;
      }
      EXPECT_EQ(time, 2 * (micro_batches + stages - 1)) << stages << " stages, " << micro_batches << " micro-batches";
    }
}

TEST(RowsOfMicroBatches, AreAsEqualAsPossible) {
  EXPECT_EQ(rows_of_micro_batches(13, 4), (std::vector<int64_t>{4, 3, 3, 3}));
  EXPECT_EQ(rows_of_micro_batches(8, 4), (std::vector<int64_t>{2, 2, 2, 2}));
  EXPECT_EQ(rows_of_micro_batches(3, 3), (std::vector<int64_t>{1, 1, 1}));
}

}  // namespace
}  // namespace lockstep
