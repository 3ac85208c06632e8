#include "launch/diagnosis/group_order.h"

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "launch/launch_error.h"
#include "launch/plan.h"
#include "launch/simulation.h"

// Ranks that use several groups in different orders, as their pages show them, and ranks that only look like that.

namespace lockstep::simulation {
namespace {

constexpr uint64_t kAll = 7, kFirst = 11, kSecond = 13, kThird = 17;  // groups

/// The rank is a part of a group of these ranks, in which it has started so many collectives.
void add(RankView& rank, uint64_t group, uint64_t members, uint64_t collectives) {
  const std::string name = group == kAll      ? ""
                           : group == kFirst  ? "subgroup 0"
                           : group == kSecond ? "subgroup 1"
                                              : "subgroup 2";
  rank.account.groups.push_back({.id = group, .members = members, .name = name, .collectives = collectives});
}

/// It waits for the last collective that it has started in the group, which needs all ranks.
void wait_in_group(RankView& rank, uint64_t group) {
  for (const RankStatus::Group& one : rank.account.groups) {
    if (one.id != group) continue;
    wait_in(rank, one.collectives - 1, 0);
    rank.account.operation.group_id = group;
    rank.account.operation.group = one.name.empty() ? "" : one.text();
    rank.account.waiting = rank.account.has_one_caller = true;
    rank.account.awaited = {
        .group = group, .sequence = one.collectives - 1, .collective = one.collectives, .needs = one.members};
  }
}

/// All ranks are parts of one group and of a subgroup; rank 0 has called the first, the others the second.
std::vector<RankView> two_groups(size_t count) {
  std::vector<RankView> ranks(count);
  const uint64_t members = (uint64_t{1} << count) - 1;
  for (size_t i = 0; i < count; ++i) {
    ranks[i].account.phase = RankStatus::Phase::kJoined;
    ranks[i].process_state = 'S';
    add(ranks[i], kAll, members, i == 0 ? 6 : 5);
    add(ranks[i], kFirst, members, i == 0 ? 2 : 3);
    wait_in_group(ranks[i], i == 0 ? kAll : kFirst);
  }
  return ranks;
}

/// Rank 0 waits for 1, 1 for 2, 2 for 0, each in a group of the two.
std::vector<RankView> ring() {
  std::vector<RankView> ranks(3);
  const uint64_t groups[] = {kFirst, kSecond, kThird}, members[] = {0b011, 0b110, 0b101};
  for (size_t i = 0; i < 3; ++i) {
    ranks[i].account.phase = RankStatus::Phase::kJoined;
    ranks[i].process_state = 'S';
    for (size_t group = 0; group < 3; ++group)
      if ((members[group] >> i & 1) != 0) add(ranks[i], groups[group], members[group], group == i ? 1 : 0);
    wait_in_group(ranks[i], groups[i]);
  }
  return ranks;
}

TEST(GroupOrder, TwoGroupsInDifferentOrdersAreACycle) {
  const auto cycle = find_group_cycle(two_groups(2));
  ASSERT_TRUE(cycle);
  EXPECT_EQ(cycle->waits, (std::vector<GroupCycle::Wait>{{0, kAll, 6}, {1, kFirst, 3}}));
  EXPECT_EQ(cycle->text(two_groups(2)),
            "rank 0 waits for rank 1 in the group of all ranks, rank 1 for rank 0 in subgroup 0 (ranks 0, 1)");
  const auto of_three = find_group_cycle(two_groups(3));
  ASSERT_TRUE(of_three);
  EXPECT_EQ(of_three->waits.size(), 2u) << "rank 2 waits for rank 0, too";
}

TEST(GroupOrder, SoIsARing) {
  const auto cycle = find_group_cycle(ring());
  ASSERT_TRUE(cycle);
  EXPECT_EQ(cycle->text(ring()),
            "rank 0 waits for rank 1 in subgroup 0 (ranks 0, 1), rank 1 for rank 2 in subgroup 1 (ranks 1, 2), rank 2 "
            "for rank 0 in subgroup 2 (ranks 0, 2)");
  std::vector<RankView> with_another = ring();
  with_another.insert(with_another.begin(), RankView{});
  EXPECT_FALSE(find_group_cycle(with_another)) << "the numbers name other ranks";
}

struct Harmless {
  const char* name;
  std::function<void(std::vector<RankView>&)> change;
};

TEST(GroupOrder, RanksThatMayGoOnAreInNone) {
  const std::vector<Harmless> table{
      {"rank 1 has started the collective, and waits for another",
       [](auto& ranks) { ranks[1].account.groups[0].collectives = 6; }},
      {"rank 0 has started the other one", [](auto& ranks) { ranks[0].account.groups[1].collectives = 3; }},
      {"rank 1 is in no collective",
       [](auto& ranks) {
         ranks[1].account.waiting = ranks[1].account.operation.running = false;
         ranks[1].account.awaited = {};
       }},
      {"rank 1 has started a collective and computes", [](auto& ranks) { ranks[1].account.waiting = false; }},
      {"several threads of rank 1 call", [](auto& ranks) { ranks[1].account.has_one_caller = false; }},
      {"several threads of rank 0 call", [](auto& ranks) { ranks[0].account.has_one_caller = false; }},
      {"rank 1 waits for a message", [](auto& ranks) { ranks[1].account.awaited = {}; }},
      {"what rank 0 waits for needs no call of rank 1", [](auto& ranks) { ranks[0].account.awaited.needs = 0b101; }},
      {"rank 1's page has no room for the group",
       [](auto& ranks) { ranks[1].account.groups.erase(ranks[1].account.groups.begin()); }},
      {"rank 1 is stopped", [](auto& ranks) { ranks[1].process_state = 'T'; }},
      {"rank 1 has ended", [](auto& ranks) { ranks[1].ended = true; }},
      {"rank 1 has left", [](auto& ranks) { ranks[1].account.phase = RankStatus::Phase::kLeft; }},
      {"the pages name ranks that there are not",
       [](auto& ranks) {
         for (auto& rank : ranks) rank.account.awaited.needs = ~uint64_t{0} << 2;
       }},
  };
  for (const Harmless& row : table) {
    std::vector<RankView> ranks = two_groups(2);
    row.change(ranks);
    EXPECT_FALSE(find_group_cycle(ranks)) << row.name;
  }
}

TEST(GroupOrder, ARankThatWaitsForSomebodyElseFirstIsInNone) {
  // Rank 1 waits for the root of a broadcast, which is late; then it will come to where rank 2 waits for it.
  std::vector<RankView> ranks = ring();
  ranks[0].account.waiting = ranks[0].account.operation.running = false;
  ranks[0].account.awaited = {};
  EXPECT_FALSE(find_group_cycle(ranks));
}

TEST(GroupOrder, OneGroupHasNoCycle) {
  std::vector<RankView> ranks(3);
  for (size_t i = 0; i < 3; ++i) {
    ranks[i].account.phase = RankStatus::Phase::kJoined;
    add(ranks[i], kAll, 0b111, 5 + i);
    wait_in_group(ranks[i], kAll);
  }
  EXPECT_FALSE(find_group_cycle(ranks));
  EXPECT_FALSE(wait_in_several_groups(ranks));
  EXPECT_TRUE(wait_in_several_groups(two_groups(2)));
}

TEST(GroupOrder, TheLinesNameGroupsAndWhatARankWaitsFor) {
  std::vector<RankView> ranks = two_groups(2);
  const auto stall = diagnose(ranks);
  ASSERT_TRUE(stall);
  EXPECT_EQ(stall->kind, Stall::Kind::kGroupOrder);
  EXPECT_EQ(stall->lines, (std::vector<std::string>{
                              "rank 0 waits in all_reduce #5 (Float [64, 10]) for rank 1",
                              "rank 1 waits in all_reduce #2 (Float [64, 10]) in subgroup 0 (ranks 0, 1) for rank 0"}));
  // It has started another one since.
  ranks[1].account.operation.group_id = kAll;
  ranks[1].account.operation.group = "";
  ranks[1].account.operation.sequence = 4;
  ranks[1].account.has_one_caller = false;
  const auto unsure = diagnose(ranks);
  EXPECT_EQ(unsure->kind, Stall::Kind::kAllWait);
  EXPECT_EQ(unsure->what, "all ranks wait, in collectives of different groups");
  EXPECT_EQ(unsure->lines[1],
            "rank 1 waits in operation #2 in subgroup 0 (ranks 0, 1) (started last: all_reduce #4 (Float [64, 10])) "
            "for rank 0");
}

class EndOfACycle : public ::testing::Test {
 protected:
  EndOfACycle() {
    for (size_t i = 0; i < run.ranks.size(); ++i) run.ranks[i] = two_groups(2)[i];
    for (auto& rank : run.ranks) rank.account.collective_timeout = std::chrono::minutes(30);
    run.look();
  }
  Simulation run{{.ranks = 2, .hang_timeout = std::chrono::minutes(5)}};
};

TEST_F(EndOfACycle, ComesAfterAFewSeconds) {
  EXPECT_EQ(run.wait(seconds(7)), Kinds{});
  EXPECT_EQ(run.wait(seconds(3)), Kinds{Kind::kSignal});
  EXPECT_EQ(run.code(), kExitHang);
  EXPECT_TRUE(contains(run.said, "rank 0 waits for rank 1 in the group of all ranks")) << run.said;
  EXPECT_EQ(run.state().evidence.hang->kind, Stall::Kind::kGroupOrder);
}

TEST_F(EndOfACycle, DoesNotComeWhileAPageChanges) {
  for (int second = 0; second < 60; ++second) {
    ++run.ranks[0].account.beats;
    EXPECT_EQ(run.wait(seconds(1)), Kinds{});
  }
}

TEST_F(EndOfACycle, NorWhileARankComputesInAnotherThread) {
  run.load = {0, 1};
  EXPECT_EQ(run.wait(seconds(200)), Kinds{});
  run.load = {0.03, 0.03};  // what waits need
  EXPECT_EQ(run.wait(seconds(12)), Kinds{Kind::kSignal});
}

TEST_F(EndOfACycle, NorIfAWaitBeganOnlyNow) {
  run.ranks[1].account.waiting = false;
  EXPECT_EQ(run.wait(seconds(60)), Kinds{});
  run.ranks[1].account.waiting = true;
  EXPECT_EQ(run.wait(seconds(7)), Kinds{});
  EXPECT_EQ(run.wait(seconds(3)), Kinds{Kind::kSignal});
}

TEST_F(EndOfACycle, NorIfTheRanksGiveUpSoonByThemselves) {
  run.ranks[1].account.collective_timeout = seconds(20);
  EXPECT_EQ(run.wait(seconds(60)), Kinds{});
}

TEST(GroupOrder, NothingIsEndedWithoutATimeout) {
  Simulation run({.ranks = 2, .hang_timeout = kNever});
  for (size_t i = 0; i < run.ranks.size(); ++i) run.ranks[i] = two_groups(2)[i];
  run.look();
  EXPECT_EQ(run.wait(std::chrono::hours(1)), Kinds{});
  EXPECT_TRUE(contains(run.said, "rank 0 waits for rank 1 in the group of all ranks")) << run.said;
}

TEST(GroupOrder, WhereSeveralThreadsCallTheUsualPatienceCounts) {
  Simulation run({.ranks = 2, .hang_timeout = seconds(60)});
  for (size_t i = 0; i < run.ranks.size(); ++i) run.ranks[i] = two_groups(2)[i];
  for (auto& rank : run.ranks) rank.account.has_one_caller = false;
  run.look();
  EXPECT_EQ(run.wait(seconds(59)), Kinds{});
  EXPECT_EQ(run.wait(seconds(3)), Kinds{Kind::kSignal});
}

}  // namespace
}  // namespace lockstep::simulation
