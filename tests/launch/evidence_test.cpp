#include "launch/diagnosis/evidence.h"

#include "launch/simulation.h"

// That a run is judged from all evidence before it is decided what follows.

namespace lockstep::simulation {
namespace {

/// A run of three ranks whose rank 1 ends like this after some steps, or before the first.
Simulation run_with_end(const RunSettings& settings, ProcessEnd how, bool steps) {
  Simulation run(settings);
  if (steps) train(run);
  run.end(1, how);
  for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
  return run;
}

TEST(Evidence, AKillForMemoryIsOneBeforeTheRestartIsDecided) {
  for (const bool steps : {false, true}) {
    Simulation run({.ranks = 3, .max_restarts = 1});
    if (steps) train(run);
    run.memory.count = 2;
    run.end(1, killed(SIGKILL));
    for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
    EXPECT_EQ(run.state().verdict.exit_code, kExitOutOfMemory);
    ASSERT_EQ(run.state().history.failures.size(), 1U) << run.said;
    EXPECT_EQ(run.state().history.failures[0].exit_code, kExitOutOfMemory) << "what the decision was made on";
    EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
  }
}

TEST(Evidence, WhatTheKernelCountsIsNoEvidenceAgainstOthers) {
  Simulation run({.ranks = 3});
  run.memory.count = 1;
  run.end(1, killed(SIGSEGV));
  for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
  EXPECT_EQ(run.state().verdict.exit_code, kExitRankKilled);
  EXPECT_EQ(run.state().verdict.culprit->rank, 1);
}

TEST(Evidence, AMissingLibraryIsKnownBeforeARankIsLeftOut) {
  Simulation run({.ranks = 3, .max_restarts = 9, .elastic = RankRange{1, 3}});
  train(run);
  run.end(1, killed(SIGKILL));
  for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
  EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
  run.ranks.assign(3, RankView{});
  run.ranks[1].missing_library = "liby.so";
  run.end(1, exited(127));
  for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
  EXPECT_EQ(run.state().verdict.exit_code, kExitNotStarted);
  EXPECT_EQ(run.state().phase, Phase::kOver) << "two ranks would not find the library either";
  EXPECT_TRUE(contains(run.said, "no step was completed since the last start")) << run.said;
}

/// While the others are still to be stopped, too: they have their whole grace, since nothing follows.
TEST(Evidence, AMissingLibraryIsKnownBeforeTheGraceIsChosen) {
  for (const bool missing : {true, false}) {
    Simulation run({.ranks = 3, .grace = seconds(5), .max_restarts = 9, .elastic = RankRange{1, 3}});
    train(run);
    run.end(1, killed(SIGKILL));
    for (const int rank : {0, 2}) run.end(rank, killed(SIGTERM));
    run.look();
    run.ranks.assign(3, RankView{});
    if (missing) run.ranks[1].missing_library = "liby.so";
    EXPECT_EQ(run.end(1, exited(127)), Kinds{Kind::kSignal});
    EXPECT_EQ(*run.state().deadline - run.now(), missing ? seconds(5) : milliseconds(100));
  }
}

TEST(Evidence, IsWhatIsKnownWhenNothingMoreIsAwaited) {
  Simulation run({.ranks = 2, .max_restarts = 1});
  run.end(1, exited(127));
  EXPECT_EQ(run.judged().exit_code, kExitRankFailed);
  run.ranks[1].missing_library = "liby.so";  // the rest of its output has been read
  EXPECT_EQ(run.end(0, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().verdict.exit_code, kExitNotStarted);
  EXPECT_EQ(run.state().exit_code, kExitNotStarted);
  EXPECT_EQ(run.state().verdict.headline, "could not start: the library liby.so is missing");
}

TEST(Evidence, TheLibraryThatTheDynamicLoaderNames) {
  EXPECT_EQ(missing_library({"a", "x: error while loading shared libraries: liby.so: no such file"}), "liby.so");
  EXPECT_EQ(missing_library({"sh: foo: not found"}), "");
}

TEST(Evidence, A127OfAShellIsAFailureOfTheRank) {
  EXPECT_EQ(run_with_end({.ranks = 3}, exited(127), true).state().verdict.exit_code, kExitRankFailed);
  EXPECT_EQ(run_with_end({.ranks = 3}, exited(1), true).state().verdict.exit_code, kExitRankFailed);
}

TEST(Evidence, TheFirstStartIsWorthItsTries) {
  Simulation run = run_with_end({.ranks = 3, .max_restarts = 1}, killed(SIGKILL), false);
  EXPECT_EQ(run.state().phase, Phase::kPausing) << run.said;
  EXPECT_EQ(run_with_end({.ranks = 3}, killed(SIGKILL), true).state().phase, Phase::kOver) << "nobody asked for any";
}

}  // namespace
}  // namespace lockstep::simulation
