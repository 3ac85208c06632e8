#pragma once

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "collective_job.h"
#include "systems.h"
#include "triad.h"

namespace lockstep::bench {

struct ContestOptions {
  int ranks = 2;
  int rounds = 10;
  double slice_ms = 10;  ///< for one system and case in one round
  size_t triad_bytes = size_t{64} << 20;
  std::vector<Case> cases;
};

/// All systems on all cases in interleaved rounds: within a round they take turns case by case, and who goes first
/// changes from round to round. Only one system is awake at a time. A system that breaks is out, with its reason kept.
class Contest {
 public:
  /// `folder` is empty and its own.
  Contest(std::vector<System> systems, ContestOptions options, const std::string& folder);

  /// Checks every result of every system, then measures; progress goes to stderr. `between` is called between two
  /// slices and may throw to end it all, `after_round` may look at result().
  void run(const std::function<void()>& between, const std::function<void()>& after_round);
  /// `rounds`, `triad_gb_per_s`, `rows`, what was not offered and what failed.
  nlohmann::ordered_json result() const;

 private:
  struct Entry {
    System system;
    std::unique_ptr<CollectiveJob> job;  ///< empty: out
    std::string version;
    std::string failure;
  };
  struct Plan {
    size_t warm, samples, batch;
  };
  using Key = std::pair<size_t, Case>;  ///< the entry's index

  void check(size_t index, const Case& wanted);
  void measure(size_t index, const Case& wanted);
  void drop(size_t index, const std::string& reason);
  /// Names the smaller case that was so slow that this one is left out; empty if there is none.
  std::string too_slow(size_t index, const Case& wanted) const;
  Plan plan_for(double estimate_ns) const;
  template <typename Step>
  void everybody(const Case& wanted, int turn, Step step);

  const ContestOptions options_;
  std::vector<Entry> entries_;
  std::map<Key, double> estimates_ns_;  ///< of what is offered and right
  std::map<Key, std::string> not_offered_;
  std::map<Key, std::vector<double>> samples_ns_;
  TriadRates triad_;
  int rounds_ = 0;  ///< that are done
};

}  // namespace lockstep::bench
