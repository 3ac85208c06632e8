#pragma once

namespace lockstep {

/// The key of each rank's own state: in a file, a list of .pt files in uint8 tensors; in memory, an entry of each
/// rank's own state.
constexpr const char* kRanksKey = "ranks";
/// The key of state taken from rank 0 alone: in memory, in rank 0's own state; in a file, with the rest of the part.
constexpr const char* kRankZeroKey = "rank_zero";

/// In rank 0's own state in memory: where slices lie in the common image (ImageSlices), if it has any.
constexpr const char* kSlicesKey = "slices";

}  // namespace lockstep
