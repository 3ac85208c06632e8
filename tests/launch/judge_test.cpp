#include <gtest/gtest.h>
#include <signal.h>

#include <cerrno>

#include "launch/diagnosis/verdict.h"
#include "launch/launch_error.h"

// judge() as a table: what is known of a run of three ranks, and who is at fault, as which code, in which words.
// verdict_test.cpp has who accuses whom.

namespace lockstep::judge_test {
namespace {

using Phase = RankStatus::Phase;

constexpr Clock::time_point kAsked{std::chrono::seconds(1000)};

ProcessEnd exited(int code) { return {ProcessEnd::Kind::kExited, code}; }
ProcessEnd killed(int signal) { return {ProcessEnd::Kind::kSignalled, signal}; }

/// Rank 1 ends like this, then the others, which were told to stop.
Evidence failed(ProcessEnd how) {
  Evidence evidence{.ranks = std::vector<RankView>(3), .signalled = true};
  for (auto& rank : evidence.ranks) rank.account = {.pid = 1, .phase = Phase::kJoined};
  evidence.ends = {{.rank = 1, .how = how, .wake_up = 1},
                   {.rank = 0, .how = killed(SIGTERM), .wake_up = 2, .stopped = true},
                   {.rank = 2, .how = killed(SIGTERM), .wake_up = 3, .stopped = true}};
  return evidence;
}
Evidence with_memory_kills(Evidence evidence, bool stopped = false) {
  evidence.ends[0].memory = {.count = 1, .counted_in = "the cgroup /a"};
  evidence.ends[0].stopped = stopped;
  return evidence;
}
Evidence with_missing_library(Evidence evidence) {
  evidence.ranks[1].missing_library = "liby.so";
  return evidence;
}
Evidence saying(RankFailure failure, ProcessEnd how, const std::string& text, bool uncaught = false) {
  Evidence evidence = failed(how);
  RankStatus& account = evidence.ranks[1].account;
  account.failure = failure;
  account.failure_text = text;
  account.uncaught = uncaught;
  return evidence;
}
Evidence lost() {
  Evidence evidence = failed({ProcessEnd::Kind::kLost, 0});
  evidence.ends[0].lost = "node2 is gone";
  evidence.lost_ranks = 1;
  return evidence;
}
/// Rank 0 fails first and says that it is because of rank 1, which ends like this.
Evidence accused(RankFailure accusation, ProcessEnd how, bool stopped, Phase phase = Phase::kJoined,
                 int opponent = -1) {
  Evidence evidence = failed(how);
  std::swap(evidence.ends[0], evidence.ends[1]);
  evidence.ends[0] = {.rank = 0, .how = exited(1), .wake_up = 1};
  evidence.ends[1].wake_up = 2;
  evidence.ends[1].stopped = stopped;
  evidence.ranks[0].account.failure = accusation;
  evidence.ranks[0].account.peer = 1;
  evidence.ranks[0].account.opponent = opponent;
  evidence.ranks[0].account.failure_text = "because of rank 1";
  evidence.ranks[1].account.phase = phase;
  return evidence;
}
Evidence hanging() {
  Evidence evidence = failed(killed(SIGTERM));
  evidence.ends[0].stopped = true;
  evidence.hang = Stall{.culprit = 1, .what = "rank 1 is STOPPED"};
  return evidence;
}
Evidence absent() {
  Evidence evidence = failed(exited(0));
  evidence.missing = MissingRank{.rank = 1, .witness = 2};
  return evidence;
}
struct Case {
  const char* name;
  Evidence evidence;
  int exit_code;
  std::string headline;
};

void PrintTo(const Case& one, std::ostream* out) { *out << one.name; }

class Judge : public ::testing::TestWithParam<Case> {};

TEST_P(Judge, NamesRankOneTheCodeAndTheWords) {
  const Verdict verdict = judge(GetParam().evidence);
  ASSERT_TRUE(verdict.culprit);
  EXPECT_EQ(verdict.culprit->rank, 1);
  EXPECT_EQ(verdict.exit_code, GetParam().exit_code);
  EXPECT_EQ(verdict.headline, GetParam().headline);
  EXPECT_TRUE(verdict.settled);
}

const ProcessEnd kNoProgram{ProcessEnd::Kind::kNotStarted, ENOEXEC};
constexpr const char* kKilled = "failed first: killed by SIGKILL (Killed)";

INSTANTIATE_TEST_SUITE_P(
    HowItEnded, Judge,
    ::testing::Values(
        Case{"code", failed(exited(3)), kExitRankFailed, "failed first: exit code 3"},
        Case{"signal", failed(killed(SIGSEGV)), kExitRankKilled,
             "failed first: killed by SIGSEGV (Segmentation fault)"},
        Case{"kill", failed(killed(SIGKILL)), kExitRankKilled, kKilled},
        Case{"exec", failed(kNoProgram), kExitNotStarted,
             "failed first: could not be started: Exec format error (neither a binary for this machine nor a script "
             "with a #! line)"},
        Case{"lost", lost(), kExitMachineLost, "was lost with its machine: node2 is gone"},
        Case{"memory", with_memory_kills(failed(killed(SIGKILL))), kExitOutOfMemory, kKilled},
        Case{"memory, another's", with_memory_kills(failed(killed(SIGSEGV))), kExitRankKilled,
             "failed first: killed by SIGSEGV (Segmentation fault)"},
        Case{"memory, but it was we", with_memory_kills(failed(killed(SIGKILL)), true), kExitRankKilled,
             std::string(kKilled) + ", after it was asked to stop"},
        Case{"memory, and it noted an error", with_memory_kills(saying(RankFailure::kStorage, killed(SIGKILL), "full")),
             kExitOutOfMemory, kKilled},
        Case{"library", with_missing_library(failed(exited(127))), kExitNotStarted,
             "could not start: the library liby.so is missing"},
        Case{"library, but it went on", with_missing_library(failed(exited(1))), kExitRankFailed,
             "failed first: exit code 1"},
        Case{"a shell's 127", failed(exited(127)), kExitRankFailed, "failed first: exit code 127"}));

INSTANTIATE_TEST_SUITE_P(
    WhatItSays, Judge,
    ::testing::Values(
        Case{"exception", saying(RankFailure::kOwn, killed(SIGABRT), "out of range\nmore", true), kExitRankFailed,
             "threw: out of range"},
        Case{"abort", saying(RankFailure::kOwn, killed(SIGABRT), "out of range"), kExitRankKilled,
             "failed first: killed by SIGABRT (Aborted)"},
        Case{"storage", saying(RankFailure::kStorage, exited(1), "full"), kExitStorage, "failed first: exit code 1"},
        Case{"input", saying(RankFailure::kInput, exited(1), "damaged"), kExitRefusedInput,
             "failed first: exit code 1"},
        Case{"limit", saying(RankFailure::kLimit, killed(SIGABRT), "no memory", true), kExitResourceLimit,
             "threw: no memory"},
        Case{"diverged", saying(RankFailure::kDiverged, exited(1), "differs"), kExitDiverged,
             "failed first: exit code 1"},
        Case{"storage, but killed", saying(RankFailure::kStorage, killed(SIGKILL), "full"), kExitRankKilled, kKilled},
        Case{"in vain", saying(RankFailure::kMissing, exited(1), "not all ranks came"), kExitHang,
             "waited too long: not all ranks came"}));

INSTANTIATE_TEST_SUITE_P(
    WhatOthersSay, Judge,
    ::testing::Values(Case{"peer failed", accused(RankFailure::kPeer, exited(7), false), kExitRankFailed,
                           "failed first: exit code 7"},
                      Case{"peer killed", accused(RankFailure::kPeer, killed(SIGSEGV), false), kExitRankKilled,
                           "failed first: killed by SIGSEGV (Segmentation fault)"},
                      Case{"peer killed for memory",
                           [] {
                             Evidence evidence = accused(RankFailure::kPeer, killed(SIGKILL), false);
                             evidence.ends[1].memory.count = 1;
                             return evidence;
                           }(),
                           kExitOutOfMemory, kKilled},
                      Case{"peer without its library",
                           with_missing_library(accused(RankFailure::kPeer, exited(127), false)), kExitNotStarted,
                           "did not join the others"},
                      Case{"peer ended well", accused(RankFailure::kPeer, exited(0), false, Phase::kLeft),
                           kExitMismatch, "ended with exit code 0 while rank 0 needed it"},
                      Case{"peer left", accused(RankFailure::kPeer, killed(SIGTERM), true, Phase::kLeft), kExitMismatch,
                           "left the group while rank 0 needed it"},
                      Case{"late", accused(RankFailure::kMissing, killed(SIGTERM), true), kExitHang,
                           "hangs: it did not arrive in time"},
                      Case{"not joined", accused(RankFailure::kMissing, killed(SIGTERM), true, Phase::kJoining),
                           kExitNotStarted, "did not join the others"},
                      Case{"other calls", accused(RankFailure::kMismatch, exited(1), false, Phase::kJoined, 2),
                           kExitMismatch, "and rank 2 make different calls"},
                      Case{"hang", hanging(), kExitHang, "hangs: rank 1 is STOPPED"},
                      Case{"absent", absent(), kExitNotStarted, "ended with exit code 0 before it joined the others"}));

TEST(JudgeOfStops, BlamesNobody) {
  const auto asked = [](int signal, std::vector<ProcessEnd> ends) {
    Evidence evidence{.ranks = std::vector<RankView>(ends.size()), .stop_signal = signal, .asked_at = kAsked};
    for (size_t rank = 0; rank < ends.size(); ++rank)
      evidence.ends.push_back({.rank = static_cast<int>(rank), .how = ends[rank], .stopped = ends[rank] != exited(0)});
    return evidence;
  };
  const auto code = [](const Evidence& evidence) {
    const Verdict verdict = judge(evidence);
    EXPECT_FALSE(verdict.culprit);
    EXPECT_EQ(verdict.headline, "");
    return verdict.exit_code;
  };
  EXPECT_EQ(code({.ends = {{.rank = 0}}, .ranks = std::vector<RankView>(1)}), kExitOk);
  EXPECT_EQ(code(asked(SIGTERM, {exited(0), exited(0)})), kExitOk) << "it was ending anyway";
  EXPECT_EQ(code(asked(SIGTERM, {exited(kExitPreempted), exited(0)})), kExitPreempted);
  EXPECT_EQ(code(asked(SIGTERM, {exited(kExitPreemptedUnsaved), exited(0)})), kExitOk);
  EXPECT_EQ(code(asked(SIGTERM, {exited(1), exited(0)})), kExitPreemptedUnsaved);
  EXPECT_EQ(code(asked(SIGINT, {exited(kExitPreempted)})), 128 + SIGINT);
  Evidence saved = asked(SIGUSR1, {exited(0)});
  saved.told = true;
  EXPECT_EQ(code(saved), kExitPreemptedUnsaved);
  saved.ranks[0].account.checkpoint = "/run/step_4";
  saved.ranks[0].account.checkpoint_time = kAsked;
  EXPECT_EQ(code(saved), kExitPreempted);
  saved.asked_twice = true;
  EXPECT_EQ(code(saved), kExitPreemptedUnsaved);
  Evidence forced = asked(SIGTERM, {exited(0)});
  forced.signalled = true;
  EXPECT_EQ(code(forced), kExitPreemptedUnsaved);
}

TEST(JudgeOfStops, AFailureBeforeOneIsAFailure) {
  Evidence evidence = with_memory_kills(failed(killed(SIGKILL)));
  evidence.stop_signal = SIGTERM;
  EXPECT_EQ(judge(evidence).exit_code, kExitOutOfMemory);
  evidence.ends[0].stopped = true;
  EXPECT_EQ(judge(evidence).exit_code, kExitPreemptedUnsaved);
  EXPECT_FALSE(judge(evidence).culprit);
}

}  // namespace
}  // namespace lockstep::judge_test
