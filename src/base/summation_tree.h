#pragma once

#include <vector>

namespace lockstep {

/// Leaves [first, last) of a tree.
struct LeafRange {
  int first = 0, last = 0;
  int size() const { return last - first; }
  bool contains(int leaf) const { return first <= leaf && leaf < last; }
  bool operator==(const LeafRange&) const = default;
};

// The order in which `leaves` summands, one per virtual rank, are added: a balanced binary tree. The left half of n
// leaves has the largest power of two below n, and so on within the halves: ((0 + 1) + (2 + 3)) + 4.
//
// Rank r of N works for the block [r * leaves / N, (r + 1) * leaves / N). It contributes the largest subtrees within
// its block, at most 2 log2(leaves) of them. So the sum has the same bits for every N.

/// The leaves that `rank` works for.
LeafRange block_of(int rank, int world_size, int leaves);
/// The rank that works for `leaf`.
int owner_of(int leaf, int world_size, int leaves);

/// The largest subtrees within the block, from left to right.
std::vector<LeafRange> whole_subtrees(LeafRange block, int leaves);

/// The number of sums within the block that are complete once `leaf` and all leaves to its left are present. With a
/// stack of partial sums, push the leaf and then add the two topmost this many times; at the block's end the stack
/// holds the whole subtrees.
int sums_completed_by(int leaf, LeafRange block, int leaves);

/// How the subtrees of all ranks are combined into the root.
struct CombinePlan {
  struct Sum {
    int into, from;  ///< numbers of pieces: into += from
    bool operator==(const Sum&) const = default;
  };
  std::vector<LeafRange> pieces;  ///< of all ranks, from left to right
  std::vector<int> first_piece;   ///< of each rank, followed by the number of pieces
  std::vector<Sum> sums;          ///< in order; the root is piece 0
  /// Each rank has one piece, and these are added in the tree over the ranks, as a group of ranks adds its tensors.
  bool is_tree_over_ranks = false;
};
CombinePlan plan_combination(int world_size, int leaves);

}  // namespace lockstep
