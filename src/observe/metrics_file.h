#pragma once

#include <lockstep/reduction_stats.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "observe/growing_file.h"
#include "observe/system_facts.h"

namespace lockstep {

struct TrainingPlace {
  int64_t step = 0;   ///< optimizer steps done
  int64_t epoch = 0;  ///< counts from 0
};

/// Several consecutive steps, and their costs on this rank.
struct StepsTaken {
  int64_t steps = 0;
  int64_t samples = 0;
  double seconds = 0;
  double longest_s = 0;        ///< of one step
  double communication_s = 0;  ///< the part of `seconds` in which this rank waited for the others
};

/// The first line of a run, apart from facts about the machine.
struct RunFacts {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int threads = 1;
  std::string backend;
  std::string libtorch_version;
  int64_t first_step = 0;
};

/// A rank's metrics, one JSON object per line; docs/observing.md has the format. An existing file is continued: a
/// resumed run appends its lines. If the disk is full, lines are lost but training goes on; once there is room again,
/// the file says how many are missing. Used by one thread.
class MetricsFile {
 public:
  /// Throws Error if the file cannot be opened, unless only space is missing.
  MetricsFile(const std::string& path, std::chrono::milliseconds flush_interval);
  /// Appends the last line, which distinguishes a finished run from an interrupted one.
  ~MetricsFile();

  void run(const RunFacts& facts, const SystemFacts& system);
  void scalar(TrainingPlace at, std::string_view name, double value);
  void steps(TrainingPlace at, const StepsTaken& taken);
  void reductions(TrainingPlace at, const ReductionStats& stats);
  void flush() { file_.flush(); }

 private:
  void begin(const char* type, TrainingPlace at);
  void end();

  GrowingFile file_;
  std::string line_;
  int64_t told_lost_ = 0;
  TrainingPlace last_;
  int exceptions_;  ///< in flight when the file was opened
};

}  // namespace lockstep
