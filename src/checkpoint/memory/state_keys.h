#pragma once

namespace lockstep {

/// Each rank's own state: in a file, a list of .pt files in uint8 tensors; in memory, an entry of each rank's own
/// state.
constexpr const char* kRanksKey = "ranks";
/// In memory, in rank 0's own state: what is taken from it alone. In a file it stands where the rest of the part does.
constexpr const char* kRankZeroKey = "rank_zero";

}  // namespace lockstep
