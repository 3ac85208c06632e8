#include "base/rank_names.h"

#include <gtest/gtest.h>

namespace lockstep {
namespace {

TEST(RankNames, ListsNumbersAndFoldsThreeInARow) {
  EXPECT_EQ(list_ranks({}), "");
  EXPECT_EQ(list_ranks({4}), "4");
  EXPECT_EQ(list_ranks({0, 1}), "0, 1");
  EXPECT_EQ(list_ranks({0, 1, 3, 5, 6, 7}), "0, 1, 3, 5-7");
}

TEST(RankNames, TellOneRankFromSeveral) {
  EXPECT_EQ(rank_names(std::vector<int>{1}), "rank 1");
  EXPECT_EQ(rank_names(std::vector<int>{0, 2, 3, 4}), "ranks 0, 2-4");
}

TEST(RankNames, TakeFlagsBitsAndValues) {
  EXPECT_EQ(rank_names(std::vector<bool>{false, true, false}), "rank 1");
  EXPECT_EQ(rank_names(std::vector<bool>{true, false, true}), "ranks 0, 2");
  EXPECT_EQ(rank_names(uint64_t{1} << 63), "rank 63");
  EXPECT_EQ(rank_names(uint64_t{0b1011}), "ranks 0, 1, 3");
  EXPECT_EQ(rank_names(~uint64_t{0}), "ranks 0-63");
  EXPECT_EQ(ranks_with(std::vector<std::string>{"a", "b", "a"}, std::string("a")), "ranks 0, 2");
}

}  // namespace
}  // namespace lockstep
