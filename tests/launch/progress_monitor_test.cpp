#include "launch/diagnosis/progress_monitor.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "launch/launch_error.h"
#include "launch/simulation.h"

// Tells a hang from long work of one rank.

namespace lockstep::simulation {
namespace {

class LongWork : public ::testing::TestWithParam<int> {
 protected:
  /// Rank 0 works alone, the others wait for it in a collective that may take half an hour.
  LongWork() {
    train(run);
    for (size_t rank = 1; rank < run.ranks.size(); ++rank) wait_in(run.ranks[rank], 12, 1);
    for (auto& rank : run.ranks) rank.account.collective_timeout = std::chrono::minutes(30);
    run.look();
  }
  Kinds stopped_by_a_hang(Clock::duration at_least, Clock::duration at_most) {
    EXPECT_EQ(run.wait(at_least), Kinds{});
    auto kinds = run.wait(at_most - at_least);
    EXPECT_EQ(run.code(), kExitHang);
    return kinds;
  }
  Simulation run{{.ranks = GetParam(), .hang_timeout = std::chrono::minutes(5)}};
};
INSTANTIATE_TEST_SUITE_P(Ranks, LongWork, ::testing::Values(2, 3));

TEST_P(LongWork, ARankThatComputesIsSlowAndNotEnded) {
  // It was ended with 43 after 300 s, whatever it did.
  run.load = {1};
  EXPECT_EQ(run.wait(std::chrono::minutes(29)), Kinds{});
  EXPECT_TRUE(contains(run.said,
                       "no progress for 300 s: rank 0 computes and has not reached all_reduce #12 (Float [64, "
                       "10]); that is slow, not a hang: the others wait for up to 1800 s "
                       "(ContextOptions::collective_timeout)"))
      << run.said;
  EXPECT_EQ(std::count(run.said.begin(), run.said.end(), '\n'), 5 * (1 + GetParam())) << "after 5, 25, 125, 300, 625 s";
  run.ranks[0].account.beats = 11;
  run.look();
  EXPECT_EQ(run.state().progress.idle, Clock::duration(0));
}

TEST_P(LongWork, OneThatComputesForEverEndsALittleAfterTheOthersShouldHaveGivenUp) {
  run.load = {1};
  EXPECT_EQ(stopped_by_a_hang(std::chrono::minutes(30), std::chrono::minutes(31)), Kinds{Kind::kSignal});
}

TEST_P(LongWork, WhereNobodySaysHowLongHeWaitsTheRanksDecide) {
  for (auto& rank : run.ranks) rank.account.collective_timeout = milliseconds(0);
  run.load = {1};
  EXPECT_EQ(run.wait(std::chrono::hours(10)), Kinds{});
}

TEST_P(LongWork, OneThatSleepsIsAHangAtOnceWhenItsTimeIsUp) {
  EXPECT_EQ(stopped_by_a_hang(seconds(299), seconds(301)), Kinds{Kind::kSignal});
  EXPECT_EQ(run.judged().culprit->rank, 0);
}

TEST_P(LongWork, OneThatHasComputedAndThenSleepsIsAHangAsLongAfter) {
  run.load = {1};
  EXPECT_EQ(run.wait(seconds(200)), Kinds{});
  run.load = {0};
  EXPECT_EQ(stopped_by_a_hang(seconds(290), seconds(306)), Kinds{Kind::kSignal});
}

TEST_P(LongWork, AThreadThatLooksAtSomethingNowAndThenDoesNotPassForWork) {
  run.load = {0.001};
  EXPECT_EQ(stopped_by_a_hang(seconds(299), seconds(400)), Kinds{Kind::kSignal});
}

TEST_P(LongWork, LittleWorkIsWork) {
  run.load = {0.03};
  EXPECT_EQ(run.wait(std::chrono::minutes(29)), Kinds{});
}

TEST_P(LongWork, AHeartbeatIsProgress) {
  for (int minute = 0; minute < 60; ++minute) {
    ++run.ranks[0].account.beats;  // heartbeats are among them
    EXPECT_EQ(run.wait(std::chrono::minutes(1)), Kinds{});
  }
}

TEST_P(LongWork, RanksThatSpinInAWaitForEachOtherHang) {
  wait_in(run.ranks[0], 13, 2);
  run.load = {1, 1, 1};
  EXPECT_EQ(stopped_by_a_hang(seconds(299), seconds(301)), Kinds{Kind::kSignal});
  EXPECT_TRUE(contains(run.said, "all ranks wait")) << run.said;
}

TEST_P(LongWork, OneWithACollectiveUnderWayMayComputeBeforeItWaitsForIt) {
  wait_in(run.ranks[0], 11, 0);
  run.load = {1};
  EXPECT_EQ(run.wait(std::chrono::minutes(29)), Kinds{});
  run.ranks[0].account.waiting = true;  // and spins there
  EXPECT_EQ(run.wait(seconds(1)), Kinds{Kind::kSignal});
}

TEST_P(LongWork, AStoppedRankIsAHangBesideOneThatComputes) {
  run.load = {1};
  run.ranks.back().process_state = 'T';
  run.ranks.back().account.operation.running = false;
  if (GetParam() == 2) run.ranks[0].account.operation.running = true;
  EXPECT_EQ(stopped_by_a_hang(seconds(299), seconds(301)), Kinds{Kind::kSignal});
  EXPECT_TRUE(contains(run.said, "is STOPPED; stopping the ranks")) << run.said;
}

TEST_P(LongWork, WhatOthersComputeWhoHaveLeftDoesNotCount) {
  run.ranks[0].account.phase = RankStatus::Phase::kLeft;
  run.load = {1};
  EXPECT_EQ(stopped_by_a_hang(seconds(299), seconds(301)), Kinds{Kind::kSignal});
}

TEST_P(LongWork, WithoutATimeoutNothingIsEnded) {
  Simulation patient({.ranks = GetParam(), .hang_timeout = std::chrono::hours(24 * 7)});
  train(patient);
  patient.ranks = run.ranks;
  EXPECT_EQ(patient.wait(std::chrono::hours(24)), Kinds{});
}

TEST(RunState, ProcessorTimesAreLookedForSeldomAndOnlyInAStandstill) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(300)});
  train(run);
  wait_in(run.ranks[0], 12, 2);
  EXPECT_FALSE(run.state().wants_processor_times());
  int samples = 0;
  run.load = {0, 1};
  for (int second = 0; second < 100; ++second) {
    samples += run.state().wants_processor_times() ? 1 : 0;
    run.wait(seconds(1));
  }
  EXPECT_GE(samples, 18);
  EXPECT_LE(samples, 22);
  EXPECT_EQ(run.end(1, exited(3)), Kinds{Kind::kSignal});
  EXPECT_FALSE(run.state().wants_processor_times()) << "nothing depends on it any more";
}

}  // namespace
}  // namespace lockstep::simulation
