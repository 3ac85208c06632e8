#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

/// One bucket of the last reduction. Times are in milliseconds since its backward began.
struct BucketStats {
  std::vector<std::string> parameters{};
  int64_t bytes = 0;
  double ready_ms = 0;  ///< its last gradient was ready
  double start_ms = 0;  ///< handed to the group; later than ready if an earlier bucket was not yet full
  double end_ms = 0;    ///< reduced
  double wait_ms = 0;   ///< time that this rank waited for it
};

/// The costs of reductions on this rank, and the waits of a step.
struct ReductionStats {
  int64_t reductions = 0;
  int64_t bytes = 0;       ///< sent by this rank to the others in one reduction
  double backward_ms = 0;  ///< mean over reductions: from the first gradient to the end of the last bucket
  double wait_ms = 0;      ///< mean: the part in which this rank waited
  /// The share of communication time hidden behind backward: 1 means all of it.
  double overlap = 0;
  std::vector<BucketStats> buckets{};  ///< the last reduction

  /// By rank, while set_rank_comparison() is on; empty otherwise. The last rank to arrive waits least.
  std::vector<double> wait_ms_by_rank{};      ///< mean
  std::vector<int64_t> times_last_by_rank{};  ///< reductions in which the rank came last
  /// In words: the rank that came last most often, and in how many of the compared reductions. Empty if no rank stands
  /// out (last in more than half of them, and by more than 1 % of the time).
  std::string reason{};
};

}  // namespace lockstep
