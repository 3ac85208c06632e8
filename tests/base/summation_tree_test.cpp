#include "base/summation_tree.h"

#include <gtest/gtest.h>

#include <string>

namespace lockstep {
namespace {

/// The tree level by level: neighbours are added, an odd one moves up.
std::string tree_of(int leaves) {
  std::vector<std::string> level;
  for (int leaf = 0; leaf < leaves; ++leaf) level.push_back(std::to_string(leaf));
  while (level.size() > 1) {
    std::vector<std::string> next;
    for (size_t i = 0; i < level.size(); i += 2)
      next.push_back(i + 1 < level.size() ? "(" + level[i] + "+" + level[i + 1] + ")" : level[i]);
    level = next;
  }
  return level[0];
}

/// What a rank has once all of its leaves have come, one after the other.
std::vector<std::string> pieces_of(LeafRange block, int leaves) {
  std::vector<std::string> stack;
  for (int leaf = block.first; leaf < block.last; ++leaf) {
    stack.push_back(std::to_string(leaf));
    for (int sums = sums_completed_by(leaf, block, leaves); sums > 0; --sums) {
      const std::string right = stack.back();
      stack.pop_back();
      stack.back() = "(" + stack.back() + "+" + right + ")";
    }
  }
  return stack;
}

TEST(SummationTree, IsTheSameWhateverTheNumberOfRanks) {
  for (int leaves = 1; leaves <= 64; ++leaves)
    for (int ranks = 1; ranks <= leaves; ++ranks) {
      const CombinePlan plan = plan_combination(ranks, leaves);
      std::vector<std::string> pieces;
      int log2 = 0;
      while (1 << log2 < leaves) ++log2;
      for (int rank = 0; rank < ranks; ++rank) {
        ASSERT_EQ(plan.first_piece[static_cast<size_t>(rank)], static_cast<int>(pieces.size()));
        const LeafRange block = block_of(rank, ranks, leaves);
        const auto own = pieces_of(block, leaves);
        ASSERT_EQ(own.size(), whole_subtrees(block, leaves).size()) << leaves << " on " << ranks << ", rank " << rank;
        ASSERT_LE(static_cast<int>(own.size()), std::max(1, 2 * log2));
        pieces.insert(pieces.end(), own.begin(), own.end());
      }
      ASSERT_EQ(pieces.size(), plan.pieces.size());
      for (const auto& [into, from] : plan.sums) {
        std::string& left = pieces[static_cast<size_t>(into)];
        left = "(" + left + "+" + pieces[static_cast<size_t>(from)] + ")";
      }
      ASSERT_EQ(pieces[0], tree_of(leaves)) << leaves << " on " << ranks;
    }
}

TEST(SummationTree, BlocksCoverAllLeaves) {
  for (int leaves = 1; leaves <= 64; ++leaves)
    for (int ranks = 1; ranks <= leaves; ++ranks) {
      int next = 0;
      for (int rank = 0; rank < ranks; ++rank) {
        const LeafRange block = block_of(rank, ranks, leaves);
        ASSERT_EQ(block.first, next);
        ASSERT_GE(block.size(), leaves / ranks);
        ASSERT_LE(block.size(), (leaves + ranks - 1) / ranks);
        for (; next < block.last; ++next) ASSERT_EQ(owner_of(next, ranks, leaves), rank);
      }
      ASSERT_EQ(next, leaves);
    }
}

TEST(SummationTree, IsTheRanksOwnWhereEachBringsOnePieceOfEqualRank) {
  const auto direct = [](int ranks, int leaves) { return plan_combination(ranks, leaves).is_tree_over_ranks; };
  for (int ranks = 1; ranks <= 16; ++ranks)
    for (int each = 1; each * ranks <= 64; each *= 2) EXPECT_TRUE(direct(ranks, each * ranks)) << ranks << ' ' << each;
  EXPECT_FALSE(direct(2, 6)) << "blocks of three";
  EXPECT_FALSE(direct(4, 6)) << "blocks of one and two";
  EXPECT_FALSE(direct(3, 8));
}

TEST(SummationTree, PiecesOfSixOnTwo) {
  EXPECT_EQ(whole_subtrees({0, 3}, 6), (std::vector<LeafRange>{{0, 2}, {2, 3}}));
  EXPECT_EQ(whole_subtrees({3, 6}, 6), (std::vector<LeafRange>{{3, 4}, {4, 6}}));
  const CombinePlan plan = plan_combination(2, 6);
  EXPECT_EQ(plan.first_piece, (std::vector<int>{0, 2, 4}));
  EXPECT_EQ(plan.sums, (std::vector<CombinePlan::Sum>{{1, 2}, {0, 1}, {0, 3}}));
}

}  // namespace
}  // namespace lockstep
