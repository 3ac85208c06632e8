#include "collectives/hierarchical/halving_plan.h"

#include <algorithm>
#include <bit>

#include "collectives/hierarchical/piece_sizes.h"

namespace lockstep::hierarchical_engine {
namespace {

struct Block {
  int begin, size;
};

/// The blocks of `machines`, the largest first.
std::vector<Block> blocks_of(int machines) {
  std::vector<Block> blocks;
  for (int begin = 0; begin < machines; begin += blocks.back().size)
    blocks.push_back({begin, static_cast<int>(std::bit_floor(static_cast<unsigned>(machines - begin)))});
  return blocks;
}

/// The cells that machine `index` of a block of `size` is left with. At distance 1, 2, 4, ... it goes on with the upper
/// half if that bit of its index is set.
HalvingPlan::Move part_of(Block block, int index, size_t cells) {
  HalvingPlan::Move part{block.begin + index, 0, cells};
  for (int distance = 1; distance < block.size; distance *= 2) {
    const size_t middle = (part.first + part.last) / 2;
    ((index & distance) != 0 ? part.first : part.last) = middle;
  }
  return part;
}

/// The parts of a block that overlap a part of another block. Parts of the two are equal or one is within the other.
std::vector<HalvingPlan::Move> shared_with(Block block, const HalvingPlan& plan) {
  std::vector<HalvingPlan::Move> moves;
  for (int index = 0; index < block.size; ++index) {
    auto part = part_of(block, index, plan.cells);
    part.first = std::max(part.first, plan.first), part.last = std::min(part.last, plan.last);
    if (part.first < part.last) moves.push_back(part);
  }
  return moves;
}

double as_double(size_t number) { return static_cast<double>(number); }

double direct_seconds(const ReductionShape& shape, const LinkCosts& costs) {
  const size_t others = static_cast<size_t>(shape.machines) - 1,
               slice = shape.bytes / slices_of(shape.bytes, shape.rails);
  const double widened = as_double(shape.direct_bytes) / as_double(shape.element_bytes);
  if (shape.bytes <= kAtOnceBytes)
    return as_double(others) * (costs.message + widened * as_double(shape.bytes) * costs.byte) + costs.latency;
  const size_t whole = static_cast<size_t>(shape.machines) * kPieceBytes, parts = (slice + whole - 1) / whole;
  return 2 * (as_double(others * parts) * costs.message + costs.latency) +
         (widened + 1) * as_double(shape.bytes) * costs.byte * as_double(others) / as_double(others + 1);
}

double halving_seconds(const ReductionShape& shape, const LinkCosts& costs) {
  // A machine of the smallest block has the most messages to lend; one of the largest has the most levels.
  size_t messages = 0;
  for (const int machine : {0, shape.machines - 1})
    messages = std::max(messages, HalvingPlan::of(machine, shape.machines).messages());
  const size_t slice = shape.bytes / slices_of(shape.bytes, shape.rails);
  const size_t chunks = (slice + kHalvingBytes - 1) / kHalvingBytes;
  const double widened = as_double(shape.halving_bytes) / as_double(shape.element_bytes);
  return as_double(chunks * messages) * costs.message + as_double(messages) * costs.latency +
         (widened + 1) * as_double(shape.bytes) * costs.byte;
}

}  // namespace

HalvingPlan HalvingPlan::of(int machine, int machines) {
  const auto blocks = blocks_of(machines);
  const auto at = std::find_if(blocks.begin(), blocks.end(),
                               [&](const Block& block) { return machine < block.begin + block.size; });
  HalvingPlan plan;
  plan.cells = plan.last = static_cast<size_t>(blocks.front().size);
  const int index = machine - at->begin;
  for (int distance = 1; distance < at->size; distance *= 2) {
    const bool is_right = (index & distance) != 0;
    const size_t middle = (plan.first + plan.last) / 2;
    const Move given{at->begin + (index ^ distance), is_right ? plan.first : middle, is_right ? middle : plan.last};
    (is_right ? plan.first : plan.last) = middle;
    plan.levels.push_back({given, plan.first, plan.last, is_right});
  }
  if (at + 1 != blocks.end()) plan.borrowed = shared_with(at[1], plan);
  if (at != blocks.begin()) plan.lent = shared_with(at[-1], plan);
  return plan;
}

bool halving_is_faster(const ReductionShape& shape, const LinkCosts& costs) {
  return shape.machines > kMostDirect && shape.bytes > 0 &&
         halving_seconds(shape, costs) < direct_seconds(shape, costs);
}

}  // namespace lockstep::hierarchical_engine
