#pragma once

#include <string>
#include <vector>

#include "workers/job.h"

namespace lockstep::bench {

/// A system that trains one model on all ranks. Its workers answer
///
///     attach            -> attached MS
///     check STEPS       -> losses L... weights HASH   the first steps
///     peak              -> peak_mib M                 memory from the start until then; asked once, before any timing
///     time WARM STEPS   -> times MS... cpu MS   the latter of the whole process, a step
class StepJob : public Job {
 public:
  using Job::Job;

  /// Milliseconds of the slowest rank.
  double attach();

  struct Check {
    std::vector<std::vector<double>> losses;  ///< by rank, by step
    std::vector<std::string> weights;         ///< by rank: a hash of the bits after these steps
  };
  Check check(size_t steps);

  /// MiB of the rank that needed most.
  double peak();

  struct Times {
    std::vector<double> steps_ms;  ///< every step, the mean over ranks (who keep in step have the same anyway)
    double cpu_ms = 0;             ///< processor time of a step, all threads, the mean over ranks
  };
  Times time(size_t warm, size_t steps);

 private:
  /// Of what the ranks answer to `command`: "NAME NUMBER".
  double largest(const std::string& command, const std::string& name);
};

}  // namespace lockstep::bench
