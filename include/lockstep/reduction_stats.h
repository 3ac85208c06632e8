#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// One bucket in the last reduction. Milliseconds since its backward began.
struct BucketStats {
  std::vector<std::string> parameters;
  int64_t bytes = 0;
  double ready_ms = 0;  ///< its last gradient was there
  double start_ms = 0;  ///< handed to the group; later than ready where an earlier bucket was not full yet
  double end_ms = 0;    ///< reduced
  double wait_ms = 0;   ///< of that, how long this rank stood still for it
};

/// What reductions cost this rank, and where a step waits.
struct ReductionStats {
  int64_t reductions = 0;
  int64_t bytes = 0;       ///< of one reduction: what this rank gives to the others
  double backward_ms = 0;  ///< mean over reductions: from the first gradient to the end of the last bucket
  double wait_ms = 0;      ///< mean: the part in which this rank stood still
  /// Share of the time in which buckets were under way that backward went on: 1 is all hidden.
  double overlap = 0;
  std::vector<BucketStats> buckets;  ///< the last reduction

  /// By rank, while set_rank_comparison() is on; empty before. A rank that others wait for waits least itself: it came
  /// last.
  std::vector<double> wait_ms_by_rank;      ///< mean
  std::vector<int64_t> times_last_by_rank;  ///< reductions in which it came last
  /// The rank that came last most often and in how many of the compared reductions it did, in words; empty if no rank
  /// stands out (more than half, and by more than 1 % of the time).
  std::string reason;
};

}  // namespace lockstep
