#include "observe/progress_tracker.h"

#include <gtest/gtest.h>

namespace lockstep::progress_tracker_test {
namespace {

using std::chrono::milliseconds;

const Clock::time_point kStart = Clock::time_point() + std::chrono::hours(1);
const ProgressLine::Pass kPass{.label = "", .epoch = 2, .epochs = 5, .steps = 1000, .rank = 0, .world_size = 2};

TEST(ProgressTracker, KnowsNoRateBeforeTheFirstStep) {
  ProgressTracker tracker(kPass, kStart);
  const ProgressState state = tracker.state(kStart);
  EXPECT_EQ(state.epoch, 2);
  EXPECT_EQ(state.epochs, 5);
  EXPECT_EQ(state.step, 0);
  EXPECT_EQ(state.steps, 1000);
  EXPECT_FALSE(state.loss || state.samples_per_second || state.communication_share || state.seconds_left);
  EXPECT_FALSE(state.seconds_taken);
}

TEST(ProgressTracker, CountsTheSamplesOfAllRanks) {
  ProgressTracker tracker(kPass, kStart);
  for (int i = 0; i < 100; ++i) tracker.step(64);
  const ProgressState state = tracker.state(kStart + milliseconds(2000));
  EXPECT_EQ(state.step, 100);
  EXPECT_DOUBLE_EQ(*state.samples_per_second, 100 * 64 * 2 / 2.0);
  EXPECT_DOUBLE_EQ(*state.seconds_left, 900 * 2.0 / 100);
}

/// Virtual ranks: rank 0 works for two of three, so that four of its batches make a step of two micro-batches each.
TEST(ProgressTracker, CountsStepsOfAllRanksWhereSeveralBatchesMakeOne) {
  ProgressLine::Pass pass = kPass;
  pass.steps = 10;  // the last step has two batches
  pass.batches_per_step = 4;
  pass.share = 2 / 3.0;
  ProgressTracker tracker(pass, kStart);
  std::vector<int64_t> shown;
  for (int batch = 0; batch < 10; ++batch) {
    tracker.step(32);
    shown.push_back(tracker.final_state(kStart + milliseconds(2000)).step);
  }
  EXPECT_EQ(shown, (std::vector<int64_t>{0, 0, 0, 1, 1, 1, 1, 2, 2, 3}));
  const ProgressState state = tracker.final_state(kStart + milliseconds(2000));
  EXPECT_EQ(state.steps, 3);
  EXPECT_DOUBLE_EQ(*state.samples_per_second, 10 * 32 * 3 / 2.0 / 2.0);
  pass.first_step = 4;
  EXPECT_EQ(ProgressTracker(pass, kStart).state(kStart).step, 1);
}

TEST(ProgressTracker, GoesOnWithinAnEpoch) {
  ProgressLine::Pass pass = kPass;
  pass.first_step = 600;
  ProgressTracker tracker(pass, kStart);
  EXPECT_EQ(tracker.state(kStart).step, 600);
  for (int i = 0; i < 100; ++i) tracker.step(64);
  const ProgressState state = tracker.state(kStart + milliseconds(2000));
  EXPECT_EQ(state.step, 700);
  EXPECT_DOUBLE_EQ(*state.samples_per_second, 100 * 64 * 2 / 2.0);
  EXPECT_DOUBLE_EQ(*state.seconds_left, 300 * 2.0 / 100);
}

TEST(ProgressTracker, ForgetsWhatIsLongAgo) {
  ProgressTracker tracker(kPass, kStart);
  // Ten seconds for the first step, then a hundred steps a second, looked at each second.
  auto now = kStart + milliseconds(10000);
  tracker.step(1);
  tracker.state(now);
  for (int second = 0; second < 8; ++second) {
    for (int i = 0; i < 100; ++i) tracker.step(1);
    now += milliseconds(1000);
    tracker.state(now);
  }
  const ProgressState state = tracker.state(now);
  EXPECT_DOUBLE_EQ(*state.samples_per_second, 200);
  EXPECT_DOUBLE_EQ(*state.seconds_left, 1.99);
  EXPECT_DOUBLE_EQ(*tracker.final_state(now).samples_per_second, 2 * 801 / 18.0);
}

TEST(ProgressTracker, CommunicationIsAShareOfTheTimeSinceItsFirstReport) {
  ProgressTracker tracker(kPass, kStart);
  tracker.step(1);
  tracker.communication(100.0, kStart + milliseconds(1000));  // of earlier epochs
  EXPECT_FALSE(tracker.state(kStart + milliseconds(1000)).communication_share);
  tracker.step(1);
  tracker.communication(100.5, kStart + milliseconds(3000));
  EXPECT_DOUBLE_EQ(*tracker.state(kStart + milliseconds(3000)).communication_share, 0.25);
  EXPECT_DOUBLE_EQ(*tracker.final_state(kStart + milliseconds(6000)).communication_share, 0.1);
}

TEST(ProgressTracker, CommunicationOfTheLastSecondsOnly) {
  ProgressTracker tracker(kPass, kStart);
  auto now = kStart;
  tracker.communication(0, now);
  double total = 0;
  for (int second = 0; second < 20; ++second) {
    now += milliseconds(1000);
    total += second < 10 ? 0.9 : 0.1;
    tracker.step(1);
    tracker.communication(total, now);
    tracker.state(now);
  }
  EXPECT_NEAR(*tracker.state(now).communication_share, 0.1, 1e-9);
  EXPECT_NEAR(*tracker.final_state(now).communication_share, 0.5, 1e-9);
}

TEST(ProgressTracker, EndsWithTheTimeTaken) {
  ProgressTracker tracker(kPass, kStart);
  tracker.step(64);
  tracker.loss(0.5);
  tracker.loss(0.25);
  const ProgressState state = tracker.final_state(kStart + milliseconds(4000));
  EXPECT_DOUBLE_EQ(*state.loss, 0.25);
  EXPECT_DOUBLE_EQ(*state.seconds_taken, 4);
  EXPECT_FALSE(state.seconds_left);
  EXPECT_DOUBLE_EQ(*state.samples_per_second, 32);
}

}  // namespace
}  // namespace lockstep::progress_tracker_test
