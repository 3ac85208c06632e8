#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <tuple>
#include <vector>

#include "faultbox/run.h"

namespace lockstep::faultbox {

/// The same numbers from the same seed with every standard library.
class Draw {
 public:
  Draw(uint64_t seed, const std::string& name, int instance);
  /// first..last, both included.
  int64_t number(int64_t first, int64_t last);
  double fraction() { return static_cast<double>(engine_() >> 11) * 0x1p-53; }
  template <typename T>
  const T& one_of(const std::vector<T>& of) {
    return of[static_cast<size_t>(number(0, static_cast<int64_t>(of.size()) - 1))];
  }

 private:
  std::mt19937_64 engine_;
};

/// The result of one instance of a case.
struct Outcome {
  std::string drawn;                  ///< what was done, in words
  std::vector<std::string> problems;  ///< empty: everything is right
  bool missed = false;                ///< the fault came after the end
  bool ambiguous = false;             ///< the launcher reported that it does not know which of several failed first
  std::string skipped;                ///< why it could not be run
  std::optional<double> known_ms;     ///< from the fault to the launcher's first line about it
  std::optional<double> end_ms;       ///< from the fault to the launcher's end
  int cut_saves = 0;                  ///< ranks that were killed in the middle of a save to memory
  std::vector<double> next_step_ms;   ///< from each kill to the next finished step of a run that goes on
  std::string output;                 ///< of the launcher, for a failure
};

/// What all instances of one run of the driver share.
class Shared {
 public:
  explicit Shared(bool nightly_run) : nightly(nightly_run) {}
  /// The result of a training of faultbox_rank without a fault. Throws if that fails. `kind`: a word for it.
  std::string reference(int ranks, int steps, const std::string& kind);
  const bool nightly;

 private:
  std::mutex mutex_;
  std::map<std::tuple<int, int, std::string>, std::string> references_;  // guarded by mutex_
};

struct Case {
  const char* name;
  const char* what;
  int in_ci, nightly;  ///< instances
  int jobs;            ///< at most so many at a time; 0: as many as there are cores
  Outcome (*run)(Shared& shared, Draw& draw, int instance);
};
const std::vector<Case>& all_cases();

// Shared by the cases.

/// What must be true of a run that a fault ended: exit code, culprit, times, report, nothing left behind.
struct Expectation {
  std::vector<int> codes;
  std::vector<int> culprits;
  int64_t fault_ns = 0;
  double known_within_s = 1;
  double end_within_s = 8;
};
void expect(Outcome& outcome, Run& run, const Expectation& expected);
/// The run must have gone on as if nothing had happened.
void expect_same_result(Outcome& outcome, Run& run, Shared& shared, int ranks, int steps,
                        const std::string& kind = "sharded=none");
void add(std::vector<std::string>& problems, const std::vector<std::string>& more);

constexpr std::chrono::seconds kLongest{60};
constexpr int kSteps = 12;  ///< of a training
inline std::string text(int64_t number) { return std::to_string(number); }

Outcome kill_case(Shared& shared, Draw& draw, int instance);
Outcome sharded_case(Shared& shared, Draw& draw, int instance);
Outcome launcher_case(Shared& shared, Draw& draw, int instance);
Outcome two_case(Shared& shared, Draw& draw, int instance);
Outcome stop_case(Shared& shared, Draw& draw, int instance);
Outcome crash_case(Shared& shared, Draw& draw, int instance);
Outcome collectives_case(Shared& shared, Draw& draw, int instance);
Outcome output_case(Shared& shared, Draw& draw, int instance);
Outcome preempt_case(Shared& shared, Draw& draw, int instance);
Outcome restart_case(Shared& shared, Draw& draw, int instance);
Outcome elastic_case(Shared& shared, Draw& draw, int instance);
Outcome mlp_case(Shared& shared, Draw& draw, int instance);

}  // namespace lockstep::faultbox
