#include "fully_sharded/unit_layout.h"

#include <algorithm>

#include "data_parallel/gradient_norm.h"

namespace lockstep::fully_sharded {
namespace {

constexpr int64_t kBlock = GradientNorm::kBlock;
static_assert(kBlock % UnitLayout::kAligned == 0);

int64_t rounded_up(int64_t value, int64_t to) { return (value + to - 1) / to * to; }

}  // namespace

UnitLayout UnitLayout::of(const std::vector<int64_t>& elements, int slices) {
  int64_t all = 0, longest = kAligned;
  for (const int64_t one : elements) {
    all += rounded_up(one, kAligned);
    longest = std::max(longest, rounded_up(one, kAligned));
  }
  // A gap before each cut, shorter than a block and than any parameter, lets the cut fall between blocks or parameters.
  const int64_t gap = std::min(longest, kBlock);
  UnitLayout layout;
  layout.slice =
      std::max(gap, rounded_up((all + (slices - 1) * gap + slices - 1) / slices, gap == kBlock ? kBlock : kAligned));
  int64_t next = 0;
  for (const int64_t one : elements) {
    const int64_t cut = (next / layout.slice + 1) * layout.slice;
    if (next + one > cut) next = cut - (cut - next) / kBlock * kBlock;
    layout.offsets.push_back(next);
    next += rounded_up(one, kAligned);
  }
  return layout;
}

std::pair<int64_t, int64_t> UnitLayout::part_of(int64_t offset, int64_t elements, int number) const {
  return {std::clamp<int64_t>(number * slice - offset, 0, elements),
          std::clamp<int64_t>((number + 1) * slice - offset, 0, elements)};
}

}  // namespace lockstep::fully_sharded
