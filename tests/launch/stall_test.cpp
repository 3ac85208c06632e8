#include "launch/stall.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

namespace lockstep {
namespace {

RankView view(const char* kind, uint64_t sequence, bool running, uint64_t waits_for = 0, char state = 'S') {
  RankView rank;
  rank.account.phase = RankAccount::Phase::kJoined;
  rank.account.operation = {
      .sequence = sequence, .kind = kind, .dtype = "Float", .shape = {}, .elements = 7, .running = running};
  rank.account.waits_for = waits_for;
  rank.process_state = state;
  return rank;
}

TEST(Stall, NamesTheRankThatDoesNotCome) {
  const auto stall =
      diagnose({view("all_reduce", 5, true, 4), view("all_reduce", 5, true, 4), view("barrier", 4, false, 0, 'R')});
  ASSERT_TRUE(stall);
  EXPECT_EQ(stall->culprit, 2);
  EXPECT_EQ(stall->what, "rank 2 does not come to all_reduce #5 (Float 7 elements)");
  EXPECT_EQ(stall->lines, (std::vector<std::string>{"rank 0 waits in all_reduce #5 (Float 7 elements) for rank 2",
                                                    "rank 1 waits in all_reduce #5 (Float 7 elements) for rank 2",
                                                    "rank 2 computes; its last one: barrier #4 (Float 7 elements)"}));
}

TEST(Stall, AStoppedRankIsNamedBeforeOthers) {
  const auto stall =
      diagnose({view("all_reduce", 5, true), view("all_reduce", 4, false), view("all_reduce", 5, true, 0, 'T')});
  EXPECT_EQ(stall->culprit, 2);
  EXPECT_EQ(stall->what, "rank 2 is STOPPED");
}

TEST(Stall, ProgramsThatTellOfCollectivesAloneAreWatched) {
  std::vector<RankView> ranks = {view("all_reduce", 5, true, 2), view("all_reduce", 4, false)};
  for (auto& rank : ranks) rank.account.phase = RankAccount::Phase::kCommunicates;
  ASSERT_TRUE(diagnose(ranks));
  EXPECT_EQ(diagnose(ranks)->culprit, 1);
  EXPECT_FALSE(progress_of(ranks).empty());
}

TEST(Stall, ACollectiveThatNobodyWaitsForIsNoStall) {
  std::vector<RankView> ranks = {view("all_reduce", 5, true), view("all_reduce", 4, false)};
  for (auto& rank : ranks) rank.account.phase = RankAccount::Phase::kCommunicates;
  EXPECT_FALSE(diagnose(ranks));
}

TEST(Stall, WhereAllWaitTheEarliestIsNamed) {
  const auto stall = diagnose({view("all_reduce", 5, true, 2), view("send", 3, true, 1)});
  EXPECT_EQ(stall->culprit, 1);
}

TEST(Stall, ComputingIsNoStall) {
  EXPECT_FALSE(diagnose({view("all_reduce", 5, false), view("all_reduce", 5, false)}));
  EXPECT_FALSE(diagnose({RankView{}, RankView{}}));
  RankView ended = view("all_reduce", 5, true);
  ended.ended = true;
  EXPECT_FALSE(diagnose({ended}));
}

TEST(Stall, LinesAreBounded) {
  EXPECT_EQ(diagnose(std::vector<RankView>(64, view("barrier", 1, true)))->lines.size(), Stall::kLines);
}

TEST(Stall, ProcessesOfAGroup) {
  EXPECT_TRUE(group_lives(::getpgrp()));
  const pid_t child = ::fork();
  if (child == 0) {
    ::setpgid(0, 0);
    ::_exit(0);
  }
  siginfo_t ended{};
  ASSERT_EQ(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT), 0);
  EXPECT_FALSE(group_lives(child)) << "only a zombie is in it";
  ::waitpid(child, nullptr, 0);
  EXPECT_FALSE(group_lives(child));
}

TEST(Stall, StatesOfProcesses) {
  EXPECT_EQ(process_state(::getpid()), 'R');
  EXPECT_EQ(process_state(-1), '\0');
}

}  // namespace
}  // namespace lockstep
