#pragma once

#include <cstddef>
#include <vector>

namespace lockstep::hierarchical_engine {

/// One machine's part in an all_reduce by halving and doubling, between machines that have one partial sum each. The
/// data is cut into cells, as many as the largest power of two of machines.
///
/// Machines form blocks whose sizes are the powers of two that their number consists of, the largest first: 21 machines
/// are 16, 4 and 1. That is how the balanced tree divides them. Within a block, machines at distance 1, 2, 4, ... give
/// each other half of what they hold, and add the other half, until each holds one part of the block's sum. Then each
/// block lends its sum to the next larger one, the smallest first. The largest block has the total. It returns what was
/// lent, and the blocks' machines give each other what they lack, in the reverse order.
struct HalvingPlan {
  /// A message: cells [first, last), from or to a machine.
  struct Move {
    int machine = -1;
    size_t first = 0, last = 0;
  };
  struct Level {
    Move given;             ///< sent as a partial sum, and received as a total
    size_t first, last;     ///< the cells that this machine goes on with
    bool is_right = false;  ///< this machine's sum is the right operand
  };

  size_t cells = 1;
  std::vector<Level> levels;
  std::vector<Move> borrowed;  ///< at most one: from the next smaller block
  std::vector<Move> lent;      ///< to the next larger block; empty in the largest
  size_t first = 0, last = 1;  ///< the cells that are left to this machine after the levels

  static HalvingPlan of(int machine, int machines);

  /// The machine sends as many, and receives as many.
  size_t messages() const { return 2 * levels.size() + borrowed.size() + lent.size(); }
};

/// A placement's share in the choice, and what is to be reduced.
struct ReductionShape {
  size_t bytes = 0;  ///< of the whole operand
  size_t element_bytes = 4;
  size_t direct_bytes = 4;   ///< of an element of a partial sum, as it is sent to each machine's home
  size_t halving_bytes = 4;  ///< the same, added pair by pair
  int machines = 1;
  int rails = 1;
};

/// What a message costs its sender, and a byte on the link, in seconds. bench/scale fitted the first; the others are
/// those of 10 Gbit/s, for which the number of messages matters most.
struct LinkCosts {
  double message = 24e-6;
  double latency = 25e-6;
  double byte = 0.8e-9;
};

/// Up to this number of machines a direct exchange is as fast (docs/scale.md).
constexpr int kMostDirect = 16;

/// Whether halving and doubling takes less time than a direct exchange, of an all_reduce between more than kMostDirect
/// machines.
bool halving_is_faster(const ReductionShape& shape, const LinkCosts& costs = {});

/// Bytes of a slice that are reduced together: enough to hide messages behind bytes, and few enough that adding one
/// part and sending the next overlap.
constexpr size_t kHalvingBytes = 2 << 20;

}  // namespace lockstep::hierarchical_engine
