#pragma once

#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep::fully_sharded {

/// The places of a unit's parameters in its memory, which is cut into equal slices, one for each rank. A pure function
/// of their numbers of elements. Parameters begin at multiples of kAligned, and a cut within a parameter is a whole
/// number of GradientNorm blocks from its beginning.
struct UnitLayout {
  static constexpr int64_t kAligned = 64;

  int64_t slice = 0;             ///< elements of each
  std::vector<int64_t> offsets;  ///< of the parameters

  static UnitLayout of(const std::vector<int64_t>& elements, int slices);
  /// The elements of a parameter in this slice: [first, second), from the parameter's beginning.
  std::pair<int64_t, int64_t> part_of(int64_t offset, int64_t elements, int number) const;
};

}  // namespace lockstep::fully_sharded
