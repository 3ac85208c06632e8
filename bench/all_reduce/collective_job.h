#pragma once

#include <string>
#include <vector>

#include "case.h"
#include "workers/job.h"

namespace lockstep::bench {

/// A job whose workers are worker.h's.
class CollectiveJob : public Job {
 public:
  using Job::Job;

  struct Verdict {
    enum { kRight, kNotOffered, kWrong } kind;
    std::string text;
  };
  Verdict check(const Case& wanted);

  /// Nanoseconds an operation of every sample, for each the slowest rank's.
  std::vector<double> time(const Case& wanted, size_t warm, size_t samples, size_t batch);
};

}  // namespace lockstep::bench
