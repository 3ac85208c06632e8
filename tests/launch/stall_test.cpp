#include "launch/diagnosis/stall.h"

#include <gtest/gtest.h>

#include "launch/diagnosis/progress_monitor.h"

namespace lockstep {
namespace {

RankView view(const char* kind, uint64_t sequence, bool running, uint64_t waits_for = 0, char state = 'S') {
  RankView rank;
  rank.account.phase = RankStatus::Phase::kJoined;
  rank.account.operation = {
      .sequence = sequence, .kind = kind, .dtype = "Float", .shape = {}, .elements = 7, .running = running};
  rank.account.waits_for = waits_for;
  rank.process_state = state;
  return rank;
}

TEST(Stall, NamesTheRankThatDoesNotCome) {
  const auto stall =
      diagnose({view("all_reduce", 5, true, 4), view("all_reduce", 5, true, 4), view("barrier", 4, false)});
  ASSERT_TRUE(stall);
  EXPECT_EQ(stall->culprit, 2);
  EXPECT_EQ(stall->kind, Stall::Kind::kStays);
  EXPECT_EQ(stall->what, "rank 2 has not reached all_reduce #5 (Float 7 elements)");
  EXPECT_EQ(stall->lines,
            (std::vector<std::string>{"rank 0 waits in all_reduce #5 (Float 7 elements) for rank 2",
                                      "rank 1 waits in all_reduce #5 (Float 7 elements) for rank 2",
                                      "rank 2 is not in a collective; its last one: barrier #4 (Float 7 elements)"}));
}

TEST(Stall, ARankThatComputesIsSaidToDoSo) {
  const std::vector<RankView> ranks = {view("all_reduce", 5, true, 2), view("barrier", 4, false)};
  const auto stall = diagnose(ranks, {false, true});
  EXPECT_EQ(stall->culprit, 1);
  EXPECT_EQ(stall->kind, Stall::Kind::kComputes);
  EXPECT_EQ(stall->what, "rank 1 computes and has not reached all_reduce #5 (Float 7 elements)");
  EXPECT_EQ(stall->lines[1], "rank 1 computes; its last one: barrier #4 (Float 7 elements)");
  // With a collective that it has started and does not wait for yet.
  const auto ahead = diagnose({view("all_reduce", 5, true, 2), view("all_reduce", 4, true)}, {false, true});
  EXPECT_EQ(ahead->culprit, 1);
  EXPECT_EQ(ahead->kind, Stall::Kind::kComputes);
}

TEST(Stall, WhoMayBeAwaited) {
  EXPECT_TRUE(may_be_awaited(view("all_reduce", 5, false)));
  EXPECT_TRUE(may_be_awaited(view("all_reduce", 5, true))) << "it may compute before it waits";
  EXPECT_FALSE(may_be_awaited(view("all_reduce", 5, true, 2)));
  EXPECT_FALSE(may_be_awaited(view("all_reduce", 5, false, 0, 'T')));
  RankView rank = view("all_reduce", 5, true);
  rank.account.waiting = true;
  EXPECT_FALSE(may_be_awaited(rank));
  rank = view("all_reduce", 5, false);
  rank.account.phase = RankStatus::Phase::kLeft;
  EXPECT_FALSE(may_be_awaited(rank));
}

TEST(Stall, AStoppedRankIsNamedBeforeOthers) {
  const auto stall =
      diagnose({view("all_reduce", 5, true), view("all_reduce", 4, false), view("all_reduce", 5, true, 0, 'T')});
  EXPECT_EQ(stall->culprit, 2);
  EXPECT_EQ(stall->what, "rank 2 is STOPPED");
}

TEST(Stall, ProgramsThatTellOfCollectivesAloneAreWatched) {
  std::vector<RankView> ranks = {view("all_reduce", 5, true, 2), view("all_reduce", 4, false)};
  for (auto& rank : ranks) rank.account.phase = RankStatus::Phase::kCommunicates;
  ASSERT_TRUE(diagnose(ranks));
  EXPECT_EQ(diagnose(ranks)->culprit, 1);
  EXPECT_FALSE(progress_of(ranks).empty());
}

TEST(Stall, ACollectiveThatNobodyWaitsForIsNoStall) {
  std::vector<RankView> ranks = {view("all_reduce", 5, true), view("all_reduce", 4, false)};
  for (auto& rank : ranks) rank.account.phase = RankStatus::Phase::kCommunicates;
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

}  // namespace
}  // namespace lockstep
