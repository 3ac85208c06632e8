#include "hosts/machine_places.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <random>

namespace lockstep::hosts {
namespace {

using Counts = std::vector<int>;

MachinePlaces has(int ranks, int most = 0) { return {.ranks = ranks, .most = std::max(ranks, most)}; }
MachinePlaces lost(int ranks) { return {.ranks = ranks, .most = ranks, .lost = true}; }
MachinePlaces leaves(int ranks) { return {.ranks = ranks, .most = ranks, .leaves = true}; }
constexpr MachinePlaces kLeftOut{};

TEST(MachinePlaces, AsManyRanksAsBeforeStayWhereTheyWere) {
  EXPECT_EQ(share_out({has(2), has(1, 3), leaves(2)}, 5), (Counts{2, 1, 2}));
  EXPECT_EQ(share_out({has(4)}, 4), Counts{4});
}

TEST(MachinePlaces, ALostMachineIsLeftOutWhereTheOthersHavePlacesEnough) {
  EXPECT_EQ(share_out({lost(2), has(2)}, 2), (Counts{0, 2})) << "also the first";
  EXPECT_EQ(share_out({has(2), lost(2)}, 3), (Counts{2, 1})) << "its agent is started again, for fewer ranks";
  EXPECT_EQ(share_out({has(2), lost(2)}, 4), (Counts{2, 2}));
  EXPECT_EQ(share_out({has(1), lost(1), lost(1), has(1)}, 3), (Counts{1, 0, 1, 1})) << "one of two is needed";
  EXPECT_EQ(share_out({lost(2), has(1, 4)}, 3), (Counts{2, 1})) << "places in use count, not those on offer";
}

TEST(MachinePlaces, AMachineThatWasLeftOutStaysSo) {
  EXPECT_EQ(share_out({kLeftOut, has(1, 2)}, 2), (Counts{0, 2}));
  EXPECT_EQ(share_out({kLeftOut, has(1, 2)}, 3), (Counts{0, 2})) << "no more than there are";
}

TEST(MachinePlaces, FewerRanksLeaveFromTheLastMachinesUnlessOthersLeave) {
  EXPECT_EQ(share_out({has(2), has(2)}, 3), (Counts{2, 1}));
  EXPECT_EQ(share_out({has(2), has(2)}, 1), (Counts{1, 0}));
  EXPECT_EQ(share_out({leaves(2), has(2)}, 3), (Counts{1, 2}));
  EXPECT_EQ(share_out({leaves(2), has(2)}, 2), (Counts{1, 1})) << "it failed once, so it gives one place";
  EXPECT_EQ(share_out({leaves(1), leaves(1), has(3)}, 4), (Counts{1, 0, 3}));
}

TEST(MachinePlaces, MoreRanksTakeWhatIsOnOfferFromTheFirstOn) {
  EXPECT_EQ(share_out({has(1, 2), has(1, 3)}, 4), (Counts{2, 2}));
  EXPECT_EQ(share_out({has(0, 2), has(1, 3)}, 2), (Counts{1, 1})) << "one without ranks may come back";
}

TEST(MachinePlaces, AnyMachinesGetAsManyRanksAsTheyCan) {
  std::mt19937 random(5);
  for (int round = 0; round < 20000; ++round) {
    std::vector<MachinePlaces> machines(1 + random() % 5);
    int others = 0, most = 0;  // places of those that are not lost, and of all
    for (MachinePlaces& machine : machines) {
      machine.most = static_cast<int>(random() % 4);
      machine.ranks = static_cast<int>(random() % static_cast<unsigned>(machine.most + 1));
      machine.lost = machine.most > 0 && random() % 3 == 0;
      machine.leaves = random() % 3 == 0;
      if (!machine.lost) others += machine.ranks;
      most += machine.most;
    }
    const int ranks = 1 + static_cast<int>(random() % 12);
    const Counts shared = share_out(machines, ranks);
    ASSERT_EQ(shared.size(), machines.size());
    const int sum = std::accumulate(shared.begin(), shared.end(), 0);
    EXPECT_LE(sum, ranks);
    if (others < ranks && sum < ranks) {
      // Only what was left out is missing.
      for (size_t i = 0; i < shared.size(); ++i)
        EXPECT_TRUE(shared[i] == machines[i].most || (machines[i].lost && shared[i] == 0));
    }
    if (ranks <= others) {
      EXPECT_EQ(sum, ranks);
    }
    EXPECT_LE(sum, most);
    for (size_t i = 0; i < shared.size(); ++i) {
      EXPECT_LE(shared[i], machines[i].most);
      if (machines[i].lost && others >= ranks) {
        EXPECT_EQ(shared[i], 0);
      }
    }
  }
}

}  // namespace
}  // namespace lockstep::hosts
