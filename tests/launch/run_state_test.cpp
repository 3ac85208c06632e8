#include "launch/run_state.h"

#include <gtest/gtest.h>
#include <signal.h>

#include "launch/launch_error.h"
#include "launch/simulation.h"

namespace lockstep::simulation {
namespace {

TEST(RunState, EndsWell) {
  Simulation run({.ranks = 2});
  EXPECT_EQ(run.end(1, exited(0)), Kinds{});
  EXPECT_EQ(run.end(0, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_EQ(run.code(), kExitOk);
  EXPECT_EQ(run.said, "");
}

TEST(RunState, AFailureStopsTheOthersAndGraceKills) {
  Simulation run({.ranks = 3, .grace = milliseconds(700)});
  EXPECT_EQ(run.end(1, exited(3)), Kinds{Kind::kSignal});
  EXPECT_EQ(run.last_signal, SIGTERM);
  EXPECT_EQ(run.state().phase, Phase::kStopping);
  EXPECT_EQ(run.end(0, killed(SIGTERM)), Kinds{});
  EXPECT_EQ(run.after(milliseconds(699)), Kinds{});
  EXPECT_EQ(run.after(milliseconds(1)), Kinds{Kind::kKill});
  EXPECT_EQ(run.state().killed, std::vector<int>{2});
  EXPECT_EQ(run.end(2, killed(SIGKILL)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.code(), kExitRankFailed);
  EXPECT_EQ(run.judged().culprit->rank, 1);
}

TEST(RunState, WhatSIGKILLDoesNotEndIsLeftBehind) {
  Simulation run({.ranks = 2});
  run.end(0, exited(1));
  EXPECT_EQ(run.after(seconds(5)), Kinds{Kind::kKill});
  EXPECT_EQ(run.wait(seconds(9)), Kinds{});
  EXPECT_EQ(run.wait(seconds(1)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.code(), kExitRankFailed);
}

TEST(RunState, AnAccusedRankHasAMomentToEndByItself) {
  for (const bool ends : {true, false}) {
    Simulation run({.ranks = 2});
    train(run);
    run.ranks[0].account.failure = RankFailure::kPeer;
    run.ranks[0].account.peer = 1;
    run.ranks[1].account.failure = RankFailure::kOwn;
    EXPECT_EQ(run.end(0, exited(1)), Kinds{});
    EXPECT_EQ(*run.state().wake_at() - run.now(), milliseconds(250));
    EXPECT_EQ(run.after(milliseconds(249)), Kinds{});
    if (ends) {
      EXPECT_EQ(run.end(1, exited(7)), Kinds{Kind::kGatherEvidence});
    } else {
      EXPECT_EQ(run.after(milliseconds(1)), Kinds{Kind::kSignal});
      EXPECT_EQ(run.end(1, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
    }
    const Verdict verdict = run.judged();
    EXPECT_EQ(verdict.exit_code, kExitRankFailed);
    EXPECT_EQ(verdict.culprit->rank, 1);
    EXPECT_EQ(verdict.culprit->stopped, !ends);
  }
}

TEST(RunState, AnInterruptBlamesNobodyAndASecondKills) {
  for (const int number : {SIGINT, SIGHUP}) {
    Simulation run({.ranks = 2});
    EXPECT_EQ(run.signal(number), Kinds{Kind::kSignal});
    EXPECT_EQ(run.last_signal, number == SIGINT ? SIGINT : SIGTERM);
    run.end(0, exited(1));
    EXPECT_EQ(run.signal(number), Kinds{Kind::kKill});
    EXPECT_EQ(run.end(1, killed(SIGKILL)), Kinds{Kind::kGatherEvidence});
    EXPECT_EQ(run.code(), 128 + number);
    EXPECT_FALSE(run.judged().culprit);
  }
}

TEST(RunState, AFailureBeforeASignalIsStillToBlame) {
  Simulation run({.ranks = 2});
  run.end(0, exited(3));
  EXPECT_EQ(run.signal(SIGINT), Kinds{Kind::kKill});
  run.end(1, killed(SIGKILL));
  EXPECT_EQ(run.code(), kExitRankFailed);
}

TEST(RunState, ASignalToAProgramThatDoesNotAskStopsIt) {
  for (const int number : {SIGTERM, SIGUSR1}) {
    Simulation run({.ranks = 2});
    EXPECT_EQ(run.signal(number), Kinds{Kind::kSignal});
    EXPECT_EQ(run.last_signal, SIGTERM);
    run.end(0, killed(SIGTERM));
    run.end(1, exited(0));
    EXPECT_EQ(run.code(), kExitPreemptedUnsaved);
  }
  Simulation run({.ranks = 1});
  run.signal(SIGTERM);
  run.end(0, exited(kExitPreempted));
  EXPECT_EQ(run.code(), kExitPreempted) << "it has a way of its own, and says that it has saved";
}

class Preempted : public ::testing::Test {
 protected:
  Preempted() {
    train(run);
    for (auto& rank : run.ranks) rank.account.stop_calls = 3;
    EXPECT_EQ(run.signal(SIGTERM), Kinds{Kind::kAskToLeave});
    EXPECT_EQ(run.state().phase, Phase::kLeaving);
    run.stop_asked = true;
    run.stop_at = 4;
  }
  void tell() {
    for (auto& rank : run.ranks) rank.account.stop_calls = 4;
    run.look();
  }
  Simulation run{{.ranks = 2, .max_restarts = 3}};
};

TEST_F(Preempted, RanksThatSaveAndLeaveAre60) {
  tell();
  run.ranks[0].account.checkpoint = "/run/step_4";
  run.ranks[0].account.checkpoint_time = run.now() + seconds(1);
  EXPECT_EQ(run.after(seconds(20)), Kinds{}) << "saving takes its time";
  run.end(0, exited(0));
  EXPECT_EQ(run.end(1, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.code(), kExitPreempted);
  EXPECT_EQ(run.state().phase, Phase::kOver) << "not restarted";
}

TEST_F(Preempted, RanksMaySayItByTheirExitCode) {
  tell();
  run.end(0, exited(kExitPreempted));
  EXPECT_EQ(run.state().phase, Phase::kLeaving) << "no failure";
  run.end(1, exited(kExitPreempted));
  EXPECT_EQ(run.code(), kExitPreempted);
}

TEST_F(Preempted, AnOldCheckpointIsNone) {
  run.ranks[0].account.checkpoint = "/run/step_1";
  run.ranks[0].account.checkpoint_time = run.now() - seconds(1);
  tell();
  run.end(0, exited(0));
  run.end(1, exited(0));
  EXPECT_EQ(run.code(), kExitPreemptedUnsaved);
}

TEST_F(Preempted, ARunThatWasAtItsEndAnywayIsDone) {
  run.end(0, exited(0));
  run.end(1, exited(0));
  EXPECT_EQ(run.code(), kExitOk);
}

TEST_F(Preempted, ASecondSignalStopsAtOnce) {
  tell();
  EXPECT_EQ(run.signal(SIGTERM), Kinds{Kind::kSignal});
  run.end(0, killed(SIGTERM));
  run.end(1, killed(SIGTERM));
  EXPECT_EQ(run.code(), kExitPreemptedUnsaved);
}

TEST_F(Preempted, ARankThatFailsMeanwhileIsNamed) {
  tell();
  EXPECT_EQ(run.end(1, killed(SIGSEGV)), Kinds{Kind::kSignal});
  run.end(0, killed(SIGTERM));
  EXPECT_EQ(run.code(), kExitRankKilled);
  EXPECT_EQ(run.judged().culprit->rank, 1);
}

TEST(RunState, RanksThatWereJustStartedAgainAreAskedToo) {
  Simulation run({.ranks = 2, .max_restarts = 3});
  for (auto& rank : run.ranks) rank.account.stop_calls = 3;
  train(run);
  run.end(1, killed(SIGKILL));
  run.end(0, killed(SIGTERM));
  EXPECT_EQ(run.look(), Kinds{Kind::kRestart});
  run.ranks.assign(2, RankView{});
  EXPECT_EQ(run.signal(SIGTERM), Kinds{Kind::kAskToLeave}) << "they have not asked yet";
  run.stop_asked = true;
  run.end(0, exited(kExitPreempted));
  EXPECT_EQ(run.end(1, exited(kExitPreempted)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.code(), kExitPreempted);
}

TEST(RunState, ASignalToOneRankAsksAll) {
  Simulation run({.ranks = 2});
  train(run);
  run.stop_asked = true;
  run.look();
  EXPECT_EQ(run.state().phase, Phase::kLeaving);
  run.end(0, exited(kExitPreempted));
  run.end(1, exited(kExitPreempted));
  EXPECT_EQ(run.code(), kExitPreempted);
}

TEST(RunState, ASchedulerThatSignalsEverybodyHasAskedOnce) {
  Simulation run({.ranks = 2});
  train(run);
  run.stop_asked = true;
  run.look();
  EXPECT_EQ(run.signal(SIGTERM), Kinds{});
  EXPECT_EQ(run.state().phase, Phase::kLeaving);
  EXPECT_EQ(run.signal(SIGTERM), Kinds{Kind::kSignal}) << "the second one is meant";
  // Ranks without a handler die of it, in the same turn in which the launcher gets it.
  Simulation deaf({.ranks = 1});
  deaf.feed(SignalReceived{SIGTERM});
  deaf.end(0, killed(SIGTERM));
  EXPECT_EQ(deaf.code(), kExitPreemptedUnsaved);
}

TEST(RunState, ARankThatLeavesMayBeSeenBeforeTheRequest) {
  Simulation run({.ranks = 2});
  train(run);
  run.stop_asked = true;
  run.end(0, exited(kExitPreempted));
  EXPECT_EQ(run.state().phase, Phase::kLeaving);
  run.end(1, exited(kExitPreempted));
  EXPECT_EQ(run.code(), kExitPreempted);
  // Without a request it is a code like any other.
  Simulation unasked({.ranks = 1});
  unasked.end(0, exited(kExitPreempted));
  EXPECT_EQ(unasked.code(), kExitRankFailed);
}

TEST(RunState, ARankThatEndsWellBeforeItJoinsIsMissed) {
  for (const auto phase : {RankStatus::Phase::kUnknown, RankStatus::Phase::kJoining}) {
    Simulation run({.ranks = 3, .max_restarts = 1});
    run.ranks[0].account.phase = RankStatus::Phase::kJoining;
    run.ranks[1].account.phase = phase;
    EXPECT_EQ(run.end(1, exited(0)), Kinds{});
    EXPECT_EQ(*run.state().wake_at() - run.now(), milliseconds(250));
    EXPECT_EQ(run.after(milliseconds(249)), Kinds{}) << "rank 0 may be about to note that all have met";
    EXPECT_EQ(run.after(milliseconds(1)), Kinds{Kind::kSignal});
    EXPECT_TRUE(contains(run.said, "rank 1: exit code 0 before it joined, and rank 0 waits for it")) << run.said;
    EXPECT_EQ(run.end(0, killed(SIGTERM)), Kinds{});
    EXPECT_EQ(run.end(2, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
    const Verdict verdict = run.judged();
    EXPECT_EQ(verdict.exit_code, kExitNotStarted);
    EXPECT_EQ(verdict.culprit->rank, 1);
    EXPECT_EQ(verdict.culprit->how, exited(0));
    EXPECT_EQ(verdict.witness, 0);
    EXPECT_EQ(run.state().phase, Phase::kOver) << "another start would fail in the same way";
  }
}

TEST(RunState, ARankThatComesLateFindsWhoIsGone) {
  Simulation run({.ranks = 2});
  EXPECT_EQ(run.end(1, exited(0)), Kinds{});
  for (int turn = 0; turn < 100; ++turn) EXPECT_EQ(run.after(milliseconds(500)), Kinds{}) << "it may need nobody";
  EXPECT_EQ(run.state().wake_at(), run.now() + milliseconds(500)) << "so that it is known within a second";
  run.ranks[0].account.phase = RankStatus::Phase::kJoining;
  EXPECT_EQ(run.after(milliseconds(500)), Kinds{});
  EXPECT_EQ(run.after(milliseconds(250)), Kinds{Kind::kSignal});
}

TEST(RunState, RanksThatNobodyMissesMayEnd) {
  Simulation scripts({.ranks = 3});
  EXPECT_EQ(scripts.end(0, exited(0)), Kinds{});
  EXPECT_EQ(scripts.wait(seconds(1000)), Kinds{}) << "the others do not join";
  EXPECT_EQ(scripts.end(1, exited(0)), Kinds{});
  EXPECT_EQ(scripts.end(2, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(scripts.code(), kExitOk);

  Simulation done({.ranks = 2});  // rank 1 has left, and rank 0 did not get to note that it has joined
  done.ranks[0].account.phase = RankStatus::Phase::kJoining;
  done.ranks[1].account.phase = RankStatus::Phase::kLeft;
  done.end(1, exited(0));
  EXPECT_EQ(done.wait(seconds(1000)), Kinds{});

  Simulation met({.ranks = 2});  // the same a moment before it leaves
  met.ranks[0].account.phase = met.ranks[1].account.phase = RankStatus::Phase::kJoining;
  met.end(1, exited(0));
  met.after(milliseconds(100));
  met.ranks[0].account.phase = RankStatus::Phase::kJoined;
  EXPECT_EQ(met.wait(seconds(1000)), Kinds{});
  EXPECT_EQ(met.end(0, exited(0)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(met.code(), kExitOk);

  Simulation wrapped({.ranks = 2});  // a shell that has put the program into the background
  wrapped.ranks[0].account.phase = RankStatus::Phase::kJoining;
  wrapped.ranks[1].outlived = true;
  wrapped.end(1, exited(0));
  EXPECT_EQ(wrapped.wait(seconds(1000)), Kinds{});
  wrapped.ranks[1].outlived = false;
  EXPECT_EQ(wrapped.wait(seconds(2)), Kinds{Kind::kSignal}) << "and that has ended";
}

TEST(RunState, ARankThatFailedToJoinMissesOthersItself) {
  Simulation run({.ranks = 3});
  run.ranks[0].account.phase = RankStatus::Phase::kJoining;
  run.ranks[1].account.failure = RankFailure::kMissing;  // it timed out first; the program goes on without the others
  run.ranks[1].account.peer = 2;
  run.end(1, exited(0));
  EXPECT_EQ(run.wait(seconds(100)), Kinds{});
  run.ranks[0].account.failure = RankFailure::kMissing;
  run.ranks[0].account.peer = 2;
  run.end(0, exited(1));
  EXPECT_EQ(run.wait(seconds(1)), Kinds{Kind::kSignal});
  EXPECT_EQ(run.judged().culprit->rank, 2);
  EXPECT_EQ(run.code(), kExitNotStarted);
}

TEST(RunState, AStallIsReportedSoonAndEndedLate) {
  Simulation run({.ranks = 3, .hang_timeout = seconds(60)});
  train(run);
  wait_in(run.ranks[0], 12, 4);
  wait_in(run.ranks[1], 12, 4);
  run.ranks[2].process_state = 'T';
  run.look();
  EXPECT_EQ(run.wait(seconds(10)), Kinds{});
  EXPECT_TRUE(contains(run.said, "rank 2 is STOPPED")) << run.said;
  EXPECT_TRUE(contains(run.said, "rank 0 waits in all_reduce #12 (Float [64, 10]) for rank 2")) << run.said;
  const size_t notes = run.said.size();
  EXPECT_EQ(run.wait(seconds(10)), Kinds{});
  EXPECT_EQ(run.said.size(), notes) << "not every second";
  EXPECT_EQ(run.wait(seconds(60)), Kinds{Kind::kSignal});
  for (const int rank : {0, 1, 2}) run.end(rank, killed(SIGTERM));
  const Verdict verdict = run.judged();
  EXPECT_EQ(verdict.exit_code, kExitHang);
  EXPECT_EQ(verdict.culprit->rank, 2);
  EXPECT_EQ(verdict.testimony, "rank 2 is STOPPED");
}

TEST(RunState, ProgressOfAnyRankIsNoHang) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(60)});
  train(run);
  wait_in(run.ranks[0], 12, 2);
  for (int turn = 0; turn < 100; ++turn) {
    ++run.ranks[1].account.beats;
    EXPECT_EQ(run.wait(seconds(4)), Kinds{});
  }
  EXPECT_EQ(run.said, "");
}

TEST(RunState, LongComputingWithoutAWaitingRankIsNoHang) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(5)});
  train(run);
  EXPECT_EQ(run.wait(seconds(10000)), Kinds{});
  EXPECT_EQ(run.said, "");
}

TEST(RunState, ProgramsWithoutPagesAreNotWatched) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(5)});
  run.ranks[1].process_state = 'T';
  EXPECT_EQ(run.wait(seconds(1000)), Kinds{});
}

TEST(RunState, TimeInWhichTheLauncherDidNotLookIsNotIdle) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(60)});
  train(run);
  wait_in(run.ranks[0], 12, 2);
  run.look();
  EXPECT_EQ(run.after(seconds(100000)), Kinds{}) << "it was stopped, or the machine slept";
}

TEST(RunState, RestartsAfterProgress) {
  Simulation run({.ranks = 2, .max_restarts = 2});
  std::vector<int64_t> pauses;
  for (int start = 0; start <= 2; ++start) {
    train(run);
    EXPECT_EQ(run.end(1, killed(SIGKILL)), Kinds{Kind::kSignal});
    EXPECT_EQ(run.end(0, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
    if (start == 2) break;
    EXPECT_EQ(run.state().phase, Phase::kPausing);
    const auto pause = *run.state().wake_at() - run.now();
    pauses.push_back(std::chrono::duration_cast<seconds>(pause).count());
    EXPECT_EQ(run.after(pause), Kinds{Kind::kRestart});
    EXPECT_EQ(run.state().phase, Phase::kRunning);
    EXPECT_EQ(run.state().restarts, start + 1);
    EXPECT_TRUE(run.state().evidence.ends.empty());
    run.ranks.assign(2, RankView{});
  }
  EXPECT_EQ(pauses, (std::vector<int64_t>{0, 0}));
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_EQ(run.code(), kExitRankKilled);
  EXPECT_TRUE(contains(run.said, "no restart: all 2 restarts that --max-restarts allows were made")) << run.said;
}

TEST(RunState, ACrashLoopIsNotRestarted) {
  Simulation run({.ranks = 1, .max_restarts = 5});
  run.ranks[0].account.phase = RankStatus::Phase::kJoined;
  EXPECT_EQ(run.end(0, exited(1)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kOver);
  EXPECT_TRUE(contains(run.said, "no step was completed since the last start")) << run.said;
  // A program that reports nothing must have run for a while.
  Simulation silent({.ranks = 1, .max_restarts = 5});
  silent.after(seconds(9));
  silent.end(0, exited(1));
  EXPECT_EQ(silent.state().phase, Phase::kOver);
  Simulation lasting({.ranks = 1, .max_restarts = 5});
  lasting.after(seconds(10));
  lasting.end(0, exited(1));
  EXPECT_EQ(lasting.state().phase, Phase::kPausing);
  EXPECT_EQ(lasting.feed(SignalReceived{SIGINT}), Kinds{});
  EXPECT_EQ(lasting.state().phase, Phase::kOver);
}

TEST(RunState, AHangIsRestartedToo) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(5), .max_restarts = 1});
  train(run);
  wait_in(run.ranks[0], 12, 2);
  EXPECT_EQ(run.wait(seconds(20)), Kinds{Kind::kSignal});
  run.end(0, killed(SIGTERM));
  EXPECT_EQ(run.end(1, killed(SIGTERM)), Kinds{Kind::kGatherEvidence});
  EXPECT_EQ(run.state().phase, Phase::kPausing);
  run.ranks.assign(2, RankView{});
  EXPECT_EQ(run.wait(seconds(2)), Kinds{Kind::kRestart});
  EXPECT_FALSE(run.state().evidence.hang);
}

TEST(RunState, AStartThatFailsForSomethingOutsideIsTriedAgainWithinTheBudget) {
  for (const int budget : {0, 1, 2}) {
    Simulation run({.ranks = 2, .max_restarts = budget});
    const StartFailed lost{
        .exit_code = kExitMachineLost, .text = "b was lost before", .from_outside = true, .lost_ranks = 1};
    for (int start = 0; start < budget; ++start) {
      EXPECT_EQ(run.feed(lost), Kinds{});
      EXPECT_EQ(run.state().phase, Phase::kPausing);
      EXPECT_EQ(run.after(seconds(0)), Kinds{Kind::kRestart});
      EXPECT_EQ(run.state().settings.ranks, 2) << "the run is not elastic";
    }
    EXPECT_EQ(run.state().restarts, budget);
    EXPECT_EQ(run.feed(lost), Kinds{});
    EXPECT_EQ(run.state().phase, Phase::kOver);
    EXPECT_EQ(run.state().no_restart.empty(), budget == 0);
  }
}

TEST(RunState, AStartThatFailsByItselfOrAfterASignalIsNotTriedAgain) {
  Simulation own({.ranks = 2, .max_restarts = 5});
  EXPECT_EQ(own.feed(StartFailed{.exit_code = kExitNotStarted, .text = "no such program"}), Kinds{});
  EXPECT_EQ(own.state().phase, Phase::kOver);
  EXPECT_EQ(own.said, "");
  Simulation stopped({.ranks = 2, .max_restarts = 5});
  stopped.feed(SignalReceived{SIGTERM});
  stopped.feed(StartFailed{.exit_code = kExitMachineLost, .text = "lost", .from_outside = true});
  EXPECT_EQ(stopped.state().phase, Phase::kOver);
}

TEST(RunState, AStartThatLosesAMachineGoesOnWithoutItWhereEnoughRemain) {
  Simulation run({.ranks = 4, .max_restarts = 9, .elastic = RankRange{2, 4}});
  const StartFailed lost{.exit_code = kExitMachineLost, .text = "lost", .from_outside = true, .lost_ranks = 2};
  run.feed(lost);
  EXPECT_EQ(run.after(seconds(0)), Kinds{Kind::kRestart});
  EXPECT_EQ(run.state().settings.ranks, 2);
  EXPECT_TRUE(contains(run.said, "a machine is gone; its 2 ranks are left out")) << run.said;
  // However often: agents do not wait long for a word.
  for (int start = 0; start < 7; ++start) {
    run.feed(StartFailed{.exit_code = kExitMachineLost, .text = "lost", .from_outside = true});
    EXPECT_EQ(run.after(seconds(1)), Kinds{Kind::kRestart});
  }
}

}  // namespace
}  // namespace lockstep::simulation
