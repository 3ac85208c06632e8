#pragma once

namespace lockstep {

/// How many ranks a run may have.
struct RankRange {
  int min = 1;
  int max = 1;
  bool contains(int ranks) const { return min <= ranks && ranks <= max; }
};

}  // namespace lockstep
