#pragma once

#include <string>
#include <vector>

#include "workers/job.h"

namespace lockstep::bench {

/// A system that trains one model on all ranks. Its workers answer
///
///     attach            -> attached MS
///     check STEPS       -> losses L... weights HASH peak_mib M   the first steps; memory from the start until then
///     time WARM STEPS   -> times MS... cpu MS   the latter of the whole process, a step
class StepJob : public Job {
 public:
  using Job::Job;

  /// Milliseconds of the slowest rank.
  double attach();

  struct Check {
    std::vector<std::vector<double>> losses;  ///< by rank, by step
    std::vector<std::string> weights;         ///< by rank: a hash of the bits after these steps
    double peak_mib = 0;                      ///< of the rank that needed most
  };
  Check check(size_t steps);

  struct Times {
    std::vector<double> steps_ms;  ///< every step, the mean over ranks (who keep in step have the same anyway)
    double cpu_ms = 0;             ///< processor time of a step, all threads, the mean over ranks
  };
  Times time(size_t warm, size_t steps);
};

}  // namespace lockstep::bench
