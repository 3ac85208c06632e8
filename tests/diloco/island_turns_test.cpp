// Which fragment a round is of, and when.

#include "diloco/island_turns.h"

#include <gtest/gtest.h>

#include <set>

namespace lockstep::diloco {
namespace {

/// The turns without --islands: steps and fragments.
std::multiset<std::pair<int64_t, size_t>> turns_without_islands(int64_t every, int64_t fragments, int64_t steps) {
  std::multiset<std::pair<int64_t, size_t>> turns;
  for (int64_t step = 1; step <= steps; ++step)
    for (int64_t f = 0; f < fragments; ++f)
      if ((step + f * every / fragments) % every == 0) turns.emplace(step, static_cast<size_t>(f));
  return turns;
}

TEST(IslandTurns, AreThoseWithoutIslandsWhereNothingIsDisturbed) {
  for (const auto& [every, fragments, overlap] :
       {std::tuple(4, 4, 2), {10, 3, 0}, {100, 7, 99}, {2, 4, 1}, {5, 1, 4}, {1, 3, 0}, {3, 2, 0}}) {
    IslandTurns turns(every, fragments, overlap);
    std::multiset<std::pair<int64_t, size_t>> had;
    turns.start(/*step=*/1, /*closed=*/0);
    int64_t round = 0;
    for (int64_t step = 1; step <= 3 * every; ++step)
      while (step >= turns.at()) {
        had.emplace(step, turns.fragment_of(++round));
        turns.go_on(step, round);
      }
    EXPECT_EQ(had, turns_without_islands(every, fragments, 3 * every)) << every << ' ' << fragments;
  }
}

TEST(IslandTurns, OfOneFragmentBeginAfterTheStepInWhichAMachineJoins) {
  IslandTurns turns(4, 1, 0);
  turns.start(4, 0);
  EXPECT_EQ(turns.at(), 8);
  IslandTurns overlapped(4, 1, 1);
  overlapped.start(4, 0);
  EXPECT_EQ(overlapped.at(), 4);
}

TEST(IslandTurns, AMachineThatGoesOnHasTheTurnOfItsCheckpoint) {
  IslandTurns turns(12, 3, 0);
  turns.set_at(31);
  turns.start(30, 7);
  EXPECT_EQ(turns.at(), 31);
  turns.start(40, 8);
  EXPECT_EQ(turns.at(), 48) << "round 9 is of fragment 0";
}

TEST(IslandTurns, TheNextRoundIsAfterThoseThatAreUnderWay) {
  IslandTurns turns(4, 2, 3);
  EXPECT_EQ(turns.next_round(6), 7);
  turns.under_way.push_back({.round = 7, .fragment = 1, .sent_at = 14});
  EXPECT_EQ(turns.next_round(6), 8);
  EXPECT_EQ(turns.next_round(9), 10);
  EXPECT_FALSE(turns.is_due(16));
  EXPECT_TRUE(turns.is_due(17));
  EXPECT_EQ(turns.of_fragment(1)->round, 7);
  EXPECT_EQ(turns.of_fragment(0), nullptr);
  turns.drop(7);
  EXPECT_EQ(turns.of_round(7), nullptr);
}

TEST(IslandTurns, StepsAreRepeatedUntilThoseOfEachFragment) {
  IslandTurns turns(40, 2, 0);
  turns.come_soon(20);
  EXPECT_EQ(turns.at(), 30);
  turns.set_repeats({40, 22}, 20);
  EXPECT_EQ(turns.at(), 22);
  EXPECT_TRUE(turns.is_repeating(22));
  turns.follow(22);
  EXPECT_EQ(turns.at(), 27);
  turns.follow(37);
  EXPECT_EQ(turns.at(), 40);
  EXPECT_TRUE(turns.is_repeating(40));
  EXPECT_FALSE(turns.is_repeating(41));
}

}  // namespace
}  // namespace lockstep::diloco
