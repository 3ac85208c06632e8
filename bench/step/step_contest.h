#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "step_job.h"
#include "step_systems.h"

namespace lockstep::bench {

struct StepContestOptions {
  int rounds = 5;         ///< 0: nothing is timed, and no two systems are there at the same time
  double slice_ms = 250;  ///< for one system in one round
  size_t check_steps = 5;
  size_t settling_steps = 12;  ///< more of them, or a second, before the peak of memory is known
};

/// One model trained by all systems in interleaved rounds; who goes first changes from round to round, and only one
/// system is awake at a time, from its start on. Before anything is timed, all replicas of a system must hold the same
/// bits and all systems must have the same losses, step by step and rank by rank. A system that breaks is out, with its
/// reason kept.
class StepContest {
 public:
  /// The first system is what the others are compared with. `folder` is empty and its own.
  StepContest(StepWork work, std::vector<System> systems, StepContestOptions options, std::string folder);

  /// Attaches, checks and, with rounds, times; progress goes to stderr.
  void run();
  /// One row a system.
  nlohmann::ordered_json rows() const;
  /// Reasons by "model, optimizer, system".
  const std::map<std::string, std::string>& failed() const { return failed_; }

 private:
  struct Entry {
    System system;
    std::unique_ptr<StepJob> job;  ///< empty: out
    double attach_ms = 0;
    StepJob::Check check;
    double peak_mib = 0;
    double estimate_ms = 0;
    std::vector<std::vector<double>> rounds_ms;  ///< by round, by step
    std::vector<double> cpu_ms;                  ///< of a step, by round
  };

  void start(Entry& entry, const std::string& folder);
  void check(Entry& entry);
  void compare_losses(const Entry& entry) const;
  void measure(Entry& entry);
  template <typename Step>
  void everybody(size_t first, Step step);
  std::string full_name(const Entry& entry) const;
  bool is_checked(const Entry& entry) const;
  const Entry* reference_for_losses(const Entry& entry) const;

  const StepWork work_;
  const StepContestOptions options_;
  const std::string folder_;
  std::vector<Entry> entries_;
  std::map<std::string, std::string> failed_;
};

}  // namespace lockstep::bench
