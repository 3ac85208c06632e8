#include "base/summation_tree.h"

#include <cstddef>
#include <cstdint>

namespace lockstep {
namespace {

int middle_of(LeafRange node) {
  int leaves = 1;
  while (2 * leaves < node.size()) leaves *= 2;
  return node.first + leaves;
}

LeafRange left_half(LeafRange node) { return {node.first, middle_of(node)}; }
LeafRange right_half(LeafRange node) { return {middle_of(node), node.last}; }

bool lies_within(LeafRange node, LeafRange block) { return block.first <= node.first && node.last <= block.last; }

void collect_subtrees(LeafRange node, LeafRange block, std::vector<LeafRange>& found) {
  if (node.last <= block.first || block.last <= node.first) return;
  if (lies_within(node, block)) return found.push_back(node);
  collect_subtrees(left_half(node), block, found);
  collect_subtrees(right_half(node), block, found);
}

/// Returns the number of the piece that holds the node's sum. `next` is the first piece of the node.
int combine(LeafRange node, const std::vector<LeafRange>& pieces, int& next, std::vector<CombinePlan::Sum>& sums) {
  if (pieces[static_cast<size_t>(next)] == node) return next++;
  const int into = combine(left_half(node), pieces, next, sums);
  const int from = combine(right_half(node), pieces, next, sums);
  sums.push_back({into, from});
  return into;
}

}  // namespace

LeafRange block_of(int rank, int world_size, int leaves) {
  const auto start = [&](int64_t of) { return static_cast<int>(of * leaves / world_size); };
  return {start(rank), start(rank + 1)};
}

int owner_of(int leaf, int world_size, int leaves) {
  int rank = static_cast<int>(static_cast<int64_t>(leaf) * world_size / leaves);
  while (block_of(rank, world_size, leaves).last <= leaf) ++rank;
  return rank;
}

std::vector<LeafRange> whole_subtrees(LeafRange block, int leaves) {
  std::vector<LeafRange> found;
  collect_subtrees({0, leaves}, block, found);
  return found;
}

int sums_completed_by(int leaf, LeafRange block, int leaves) {
  int count = 0;
  LeafRange node{0, leaves};
  while (node.size() > 1) {
    if (node.last == leaf + 1 && lies_within(node, block)) ++count;
    node = leaf < middle_of(node) ? left_half(node) : right_half(node);
  }
  return count;
}

CombinePlan plan_combination(int world_size, int leaves) {
  CombinePlan plan;
  for (int rank = 0; rank < world_size; ++rank) {
    plan.first_piece.push_back(static_cast<int>(plan.pieces.size()));
    for (const LeafRange piece : whole_subtrees(block_of(rank, world_size, leaves), leaves))
      plan.pieces.push_back(piece);
  }
  plan.first_piece.push_back(static_cast<int>(plan.pieces.size()));
  int next = 0;
  combine({0, leaves}, plan.pieces, next, plan.sums);
  if (plan.pieces.size() != static_cast<size_t>(world_size)) return plan;  // each rank has at least one
  std::vector<LeafRange> ranks;
  for (int rank = 0; rank < world_size; ++rank) ranks.push_back({rank, rank + 1});
  std::vector<CombinePlan::Sum> over_ranks;
  next = 0;
  combine({0, world_size}, ranks, next, over_ranks);
  plan.is_tree_over_ranks = plan.sums == over_ranks;
  return plan;
}

}  // namespace lockstep
