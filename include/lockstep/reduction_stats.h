#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// One bucket in the last reduction. Times are milliseconds since its backward began.
struct BucketStats {
  std::vector<std::string> parameters{};
  int64_t bytes = 0;
  double ready_ms = 0;  ///< its last gradient was ready
  double start_ms = 0;  ///< handed to the group; later than ready if an earlier bucket was not full yet
  double end_ms = 0;    ///< reduced
  double wait_ms = 0;   ///< how long this rank waited for it
};

/// The cost of reductions on this rank, and the waits of a step.
struct ReductionStats {
  int64_t reductions = 0;
  int64_t bytes = 0;       ///< of one reduction: sent by this rank to the others
  double backward_ms = 0;  ///< mean over reductions: from the first gradient to the end of the last bucket
  double wait_ms = 0;      ///< mean: the part in which this rank waited
  /// The share of the communication time during which backward went on computing: 1 means all of it is hidden.
  double overlap = 0;
  std::vector<BucketStats> buckets{};  ///< the last reduction

  /// By rank, while set_rank_comparison() is on; empty otherwise. The rank that came last is the one that waits least.
  std::vector<double> wait_ms_by_rank{};      ///< mean
  std::vector<int64_t> times_last_by_rank{};  ///< reductions in which it came last
  /// In words, the rank that came last most often, and in how many of the compared reductions; empty if no rank stands
  /// out (last in more than half of them, and by more than 1 % of the time).
  std::string reason{};
};

}  // namespace lockstep
