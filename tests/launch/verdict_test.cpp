#include "launch/diagnosis/verdict.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <set>

#include "launch/launch_error.h"

namespace lockstep::verdict_test {
namespace {

using Kind = ProcessEnd::Kind;

RankEnd exited(int rank, int code, int wake_up) {
  return {.rank = rank, .pid = 100 + rank, .how = {Kind::kExited, code}, .seconds = 1.5, .wake_up = wake_up};
}
RankEnd killed(int rank, int signal, int wake_up) {
  return {.rank = rank, .pid = 100 + rank, .how = {Kind::kSignalled, signal}, .seconds = 1.5, .wake_up = wake_up};
}

/// Of the ranks that have these accounts, or, without any, of programs that do not use their pages.
Verdict judge(const std::vector<RankEnd>& ends, const std::vector<RankStatus>& accounts) {
  Evidence evidence{.ends = ends};
  for (const RankStatus& account : accounts) evidence.ranks.push_back({.account = account});
  for (const RankEnd& end : ends)
    evidence.ranks.resize(std::max(evidence.ranks.size(), static_cast<size_t>(end.rank) + 1));
  return lockstep::judge(evidence);
}

TEST(Verdict, AllWell) {
  const Verdict verdict = judge({exited(1, 0, 3), exited(0, 0, 4)}, {});
  EXPECT_EQ(verdict.exit_code, kExitOk);
  EXPECT_FALSE(verdict.culprit);
}

TEST(Verdict, TheFirstToFailIsTheCulprit) {
  const Verdict verdict = judge({exited(3, 0, 1), exited(1, 9, 2), killed(0, SIGTERM, 3), exited(2, 1, 3)}, {});
  ASSERT_TRUE(verdict.culprit);
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.exit_code, kExitRankFailed);
  EXPECT_TRUE(verdict.also_suspect.empty());
}

TEST(Verdict, InOneInstantAKilledRankIsTheCulprit) {
  const Verdict verdict = judge({exited(0, 1, 5), killed(2, SIGKILL, 5), exited(1, 0, 5), exited(3, 1, 6)}, {});
  EXPECT_EQ(verdict.culprit->rank, 2);
  EXPECT_EQ(verdict.exit_code, kExitRankKilled);
  EXPECT_TRUE(verdict.also_suspect.empty());
}

TEST(Verdict, SaysWhenItIsAmbiguous) {
  Verdict verdict = judge({exited(2, 1, 5), exited(0, 3, 5), exited(1, 0, 5)}, {});
  EXPECT_EQ(verdict.culprit->rank, 2);
  EXPECT_EQ(verdict.also_suspect, std::vector<int>{0});
  verdict = judge({killed(0, SIGABRT, 5), exited(1, 1, 5)}, {});
  EXPECT_EQ(verdict.also_suspect, std::vector<int>{1}) << "an exception that a victim did not catch ends in SIGABRT";
}

RankEnd stopped(RankEnd end) {
  end.stopped = true;
  return end;
}

RankStatus says(RankFailure failure, int peer, const std::string& text = "its words") {
  return {
      .pid = 1, .phase = RankStatus::Phase::kLeftByException, .failure = failure, .peer = peer, .failure_text = text};
}
const RankStatus kSilent{.pid = 1, .phase = RankStatus::Phase::kJoined};
const RankStatus kOwn = says(RankFailure::kOwn, -1);
RankStatus victim_of(int peer) { return says(RankFailure::kPeer, peer); }
RankStatus left() { return {.pid = 1, .phase = RankStatus::Phase::kLeft}; }
RankEnd lost(int rank, int wake_up) {
  return {.rank = rank, .how = {Kind::kLost, 0}, .wake_up = wake_up, .lost = "node2 has been silent for 4 s"};
}

TEST(Verdict, ALostMachineIsOneCulprit) {
  const Verdict verdict = judge({exited(0, 1, 5), lost(2, 5), lost(3, 5), exited(1, 1, 6)}, {});
  EXPECT_EQ(verdict.culprit->rank, 2);
  EXPECT_EQ(verdict.exit_code, kExitMachineLost);
  EXPECT_TRUE(verdict.also_suspect.empty());
  EXPECT_EQ(describe(*verdict.culprit, {}), "was lost with its machine: node2 has been silent for 4 s");
}

TEST(Verdict, ARankThatBlamesALostMachinesIsAVictim) {
  const std::vector<RankStatus> accounts = {says(RankFailure::kPeer, 2), kSilent, kSilent};
  const Verdict before = judge({exited(0, 1, 5)}, accounts);
  EXPECT_EQ(before.culprit->rank, 2);
  EXPECT_FALSE(before.settled);
  const Verdict verdict = judge({exited(0, 1, 5), lost(2, 9)}, accounts);
  EXPECT_EQ(verdict.culprit->rank, 2);
  EXPECT_EQ(verdict.exit_code, kExitMachineLost);
}

TEST(Verdict, AVictimThatEndsFirstIsNotTheCulprit) {
  const std::vector<RankEnd> ends = {exited(0, 1, 1), exited(1, 7, 2)};
  const Verdict verdict = judge(ends, {victim_of(1), kOwn});
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.culprit->how.value, 7) << "its own exit code is kept";
  EXPECT_EQ(verdict.exit_code, kExitRankFailed);
  EXPECT_EQ(verdict.witness, 0);
  EXPECT_EQ(verdict.testimony, "its words");
  EXPECT_TRUE(verdict.settled);
  // A program without a page, and one whose page says nothing: the order of ends decides.
  EXPECT_EQ(judge(ends, {}).culprit->rank, 0);
  EXPECT_EQ(judge(ends, {kSilent, kSilent}).culprit->rank, 0);
}

TEST(Verdict, ACulpritThatHasNotEndedIsAwaited) {
  Verdict verdict = judge({exited(0, 1, 1)}, {victim_of(1), kOwn});
  EXPECT_FALSE(verdict.settled);
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_FALSE(verdict.culprit->ended);
  EXPECT_EQ(verdict.exit_code, kExitRankFailed);
  // It did not end by itself: what it says still holds.
  verdict = judge({exited(0, 1, 1), stopped(killed(1, SIGTERM, 2))}, {victim_of(1), kOwn});
  EXPECT_TRUE(verdict.settled);
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.exit_code, kExitRankFailed);
  // Killed in the meantime, by itself.
  verdict = judge({exited(0, 1, 1), killed(1, SIGSEGV, 2)}, {victim_of(1), kSilent});
  EXPECT_EQ(verdict.exit_code, kExitRankKilled);
}

TEST(Verdict, ChainsOfVictims) {
  const Verdict verdict =
      judge({exited(2, 1, 1), exited(0, 1, 2), exited(1, 5, 3)}, {victim_of(1), kOwn, victim_of(0)});
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.witness, 0) << "the last link";
}

TEST(Verdict, CirclesFallBackOnTheOrder) {
  const Verdict verdict = judge({exited(1, 1, 1), exited(0, 1, 2)}, {victim_of(1), victim_of(0)});
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.exit_code, kExitRankFailed);
  EXPECT_TRUE(verdict.settled);
}

TEST(Verdict, ARankThatAccusesItselfIsTheCulprit) {
  const Verdict verdict = judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(1), victim_of(1)});
  EXPECT_EQ(verdict.culprit->rank, 1);
}

TEST(Verdict, APeerThatCannotBeNamed) {
  // No other rank has shown up yet: wait. Then one did, with a failure of its own; or all are victims.
  Verdict verdict = judge({exited(0, 1, 1)}, {victim_of(-1), kSilent, victim_of(-1)});
  EXPECT_FALSE(verdict.settled);
  verdict = judge({exited(0, 1, 1), exited(1, 3, 2)}, {victim_of(-1), kSilent, victim_of(-1)});
  EXPECT_TRUE(verdict.settled);
  EXPECT_EQ(verdict.culprit->rank, 1);
  verdict = judge({exited(0, 1, 1), stopped(exited(1, 3, 2))}, {victim_of(-1), kSilent});
  EXPECT_EQ(verdict.culprit->rank, 0) << "the other one was only told to stop";
  verdict = judge({exited(1, 1, 1), exited(0, 1, 2)}, {victim_of(-1), victim_of(-1)});
  EXPECT_EQ(verdict.culprit->rank, 1);
}

TEST(Verdict, ARankThatEndedWellTooEarly) {
  const Verdict verdict = judge({exited(1, 0, 1), exited(0, 1, 2)}, {victim_of(1), left()});
  EXPECT_EQ(verdict.exit_code, kExitMismatch);
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.witness, 0);
  // It has left the group and goes on without the others.
  EXPECT_EQ(judge({exited(0, 1, 1)}, {victim_of(1), left()}).exit_code, kExitMismatch);
  // A process that was started by the rank's own has ended.
  EXPECT_EQ(judge({exited(0, 1, 1)}, {victim_of(1), kSilent}).exit_code, kExitRankFailed);
}

TEST(Verdict, CallsThatDoNotMatchNameBothSides) {
  const auto differs = [](int peer) { return says(RankFailure::kMismatch, peer, "ranks disagree"); };
  for (const auto& ends :
       {std::vector{exited(0, 1, 1), exited(1, 1, 2)}, std::vector{exited(0, 1, 1), exited(1, 1, 1)}}) {
    const Verdict verdict = judge(ends, {differs(1), differs(0)});
    EXPECT_EQ(verdict.exit_code, kExitMismatch);
    EXPECT_EQ(verdict.culprit->rank, 1);
    EXPECT_EQ(verdict.witness, 0);
    EXPECT_EQ(verdict.testimony, "ranks disagree");
  }
}

TEST(Verdict, OfCallsThatDoNotMatchTheThirdRankIsNeither) {
  RankStatus third = says(RankFailure::kMismatch, 1, "ranks 1 and 2 disagree");
  third.opponent = 2;
  const RankStatus accuses_2 = says(RankFailure::kMismatch, 2), accuses_1 = says(RankFailure::kMismatch, 1);
  const auto check = [](const Verdict& verdict, std::set<int> both) {
    EXPECT_EQ(verdict.exit_code, kExitMismatch);
    EXPECT_EQ(std::set<int>({verdict.culprit->rank, verdict.opponent.value_or(-1)}), both);
  };
  const Verdict verdict = judge({exited(0, 1, 1)}, {third, accuses_2, accuses_1});
  check(verdict, {1, 2});
  EXPECT_EQ(verdict.witness, 0);
  EXPECT_EQ(verdict.testimony, "ranks 1 and 2 disagree");
  check(judge({exited(1, 1, 1)}, {third, accuses_2, accuses_1}), {1, 2});
  // It waited in another collective for one of the two, or for one of many that do not match.
  check(judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(1), accuses_2, accuses_1}), {1, 2});
  EXPECT_EQ(
      judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(1), says(RankFailure::kMismatch, -1), kSilent}).exit_code,
      kExitMismatch);
}

TEST(Verdict, ARankThatDidNotComeInTime) {
  const Verdict verdict =
      judge({exited(0, 1, 1), stopped(killed(1, SIGTERM, 2))}, {says(RankFailure::kMissing, 1), kSilent});
  EXPECT_EQ(verdict.exit_code, kExitHang);
  EXPECT_EQ(verdict.culprit->rank, 1);
}

TEST(Verdict, ATimeThatWasUpIsAHangWhoeverEndsFirstAndHow) {
  // The others gave up on rank 0, which comes and learns that. This was 40 if the program catches it.
  const std::vector<RankStatus> accounts = {says(RankFailure::kMissing, 0), says(RankFailure::kMissing, 0)};
  for (const auto& ends : {std::vector{exited(0, 1, 1), exited(1, 1, 2)}, std::vector{exited(1, 1, 1), exited(0, 1, 2)},
                           std::vector{killed(1, SIGABRT, 1), killed(0, SIGABRT, 2)}, std::vector{exited(0, 1, 1)}}) {
    const Verdict verdict = judge(ends, accounts);
    EXPECT_EQ(verdict.exit_code, kExitHang);
    EXPECT_EQ(verdict.culprit->rank, 0);
  }
  // An engine that cannot say which rank is missing, and ranks that miss each other.
  EXPECT_EQ(judge({exited(1, 1, 1)}, {kSilent, says(RankFailure::kMissing, -1)}).exit_code, kExitHang);
  EXPECT_EQ(judge({exited(1, 1, 1)}, {says(RankFailure::kMissing, 1), says(RankFailure::kMissing, 0)}).exit_code,
            kExitHang);
  // The rank that the others gave up on ends first, because they are gone.
  const Verdict late = judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(-1), says(RankFailure::kMissing, -1)});
  EXPECT_EQ(late.exit_code, kExitHang);
  EXPECT_EQ(late.culprit->rank, 0);
  EXPECT_EQ(late.witness, 1);
  // But a failure of its own counts more.
  EXPECT_EQ(judge({exited(1, 1, 1), exited(0, 7, 2)}, {kOwn, says(RankFailure::kMissing, 0)}).exit_code,
            kExitRankFailed);
}

TEST(Verdict, AnExceptionThatNobodyCaughtIsNoKill) {
  RankStatus threw = says(RankFailure::kOwn, -1, "out of range\nsecond line");
  EXPECT_EQ(judge({killed(1, SIGABRT, 1)}, {kSilent, threw}).exit_code, kExitRankKilled) << "abort(), some time after";
  threw.uncaught = true;
  const RankEnd end = killed(1, SIGABRT, 1);
  EXPECT_EQ(describe(end, threw), "threw: out of range");
  EXPECT_EQ(describe(killed(1, SIGKILL, 1), threw), "killed by SIGKILL (Killed)");
  EXPECT_EQ(judge({end}, {kSilent, threw}).exit_code, kExitRankFailed);
  EXPECT_EQ(judge({killed(1, SIGKILL, 1)}, {kSilent, threw}).exit_code, kExitRankKilled);
  EXPECT_EQ(judge({exited(0, 1, 1), killed(1, SIGABRT, 2)}, {victim_of(1), threw}).exit_code, kExitRankFailed);
  threw.failure = RankFailure::kStorage;
  EXPECT_EQ(judge({end}, {kSilent, threw}).exit_code, kExitStorage) << "the code of its kind";
}

TEST(Verdict, ARankThatNeverJoined) {
  const Verdict verdict =
      judge({exited(0, 1, 1), stopped(killed(1, SIGTERM, 2))}, {says(RankFailure::kMissing, 1), RankStatus{}});
  EXPECT_EQ(verdict.exit_code, kExitNotStarted);
  EXPECT_EQ(verdict.culprit->rank, 1);
}

TEST(Verdict, WhatAllRanksThrowTogether) {
  const std::vector<RankEnd> ends = {exited(1, 1, 1), exited(0, 1, 2)};
  EXPECT_EQ(judge(ends, std::vector(2, says(RankFailure::kDiverged, -1))).exit_code, kExitDiverged);
  EXPECT_EQ(judge(ends, std::vector(2, says(RankFailure::kMismatch, -1))).exit_code, kExitMismatch) << "other models";
}

TEST(Verdict, FailuresOfAKindHaveItsCode) {
  const std::pair<RankFailure, int> kinds[] = {{RankFailure::kStorage, kExitStorage},
                                               {RankFailure::kInput, kExitRefusedInput},
                                               {RankFailure::kLimit, kExitResourceLimit}};
  for (const auto& [failure, code] : kinds) {
    const RankStatus own = says(failure, -1);
    EXPECT_EQ(judge({exited(0, 1, 1)}, {own, kSilent}).exit_code, code);
    EXPECT_EQ(judge({killed(0, SIGABRT, 1)}, {own, kSilent}).exit_code, code) << "nobody caught it";
    EXPECT_EQ(judge({killed(0, SIGSEGV, 1)}, {own, kSilent}).exit_code, kExitRankKilled);
    Verdict verdict = judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(1), own});
    EXPECT_EQ(verdict.exit_code, code);
    EXPECT_EQ(verdict.culprit->rank, 1);
    verdict = judge({exited(0, 1, 1), stopped(killed(1, SIGTERM, 2))}, {victim_of(1), own});
    EXPECT_EQ(verdict.exit_code, code) << "it had no time to end by itself";
    verdict = judge({exited(0, 1, 1), exited(1, 1, 2)}, {victim_of(-1), own});
    EXPECT_EQ(verdict.exit_code, code);
    EXPECT_EQ(verdict.culprit->rank, 1);
    EXPECT_EQ(judge({exited(0, 0, 1)}, {own}).exit_code, kExitOk) << "it has succeeded after all";
  }
}

TEST(Verdict, AKillIsNobodysConsequence) {
  const Verdict verdict = judge({killed(0, SIGKILL, 1), exited(1, 1, 2)}, {victim_of(1), victim_of(0)});
  EXPECT_EQ(verdict.culprit->rank, 0);
  EXPECT_EQ(verdict.exit_code, kExitRankKilled);
}

TEST(Verdict, NamesEnds) {
  EXPECT_EQ(describe({Kind::kExited, 3}), "exit code 3");
  EXPECT_EQ(describe({Kind::kSignalled, SIGKILL}), "killed by SIGKILL (Killed)");
  EXPECT_EQ(describe({Kind::kSignalled, 40}), "killed by signal 40");
  EXPECT_EQ(describe({Kind::kNotStarted, EACCES}), "could not be started: Permission denied");
}

}  // namespace
}  // namespace lockstep::verdict_test
