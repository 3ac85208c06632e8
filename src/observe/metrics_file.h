#pragma once

#include <lockstep/reduction_stats.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <string_view>

#include "observe/growing_file.h"
#include "observe/system_facts.h"

namespace lockstep {

/// Where a training is.
struct TrainingPlace {
  int64_t step = 0;   ///< optimizer steps done
  int64_t epoch = 0;  ///< counts from 0
};

/// Some steps behind each other, and what they took on this rank.
struct StepsTaken {
  int64_t steps = 0;
  int64_t samples = 0;
  double seconds = 0;
  double longest_s = 0;        ///< of one step
  double communication_s = 0;  ///< of `seconds`, how long this rank stood still for the others
};

/// What the first line of a run says beside the machine's facts.
struct RunFacts {
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;
  int threads = 1;
  std::string backend;
  std::string libtorch_version;
  int64_t first_step = 0;
};

/// A rank's metrics, a JSON object a line; docs/observing.md has the format. A file that is there already goes on: a
/// resumed run adds its lines to it. A disk that is full costs lines, never the training; how many is in the file once
/// there is room again. Used by one thread.
class MetricsFile {
 public:
  /// Throws Error if the file cannot be opened, except for want of space.
  MetricsFile(const std::string& path, std::chrono::milliseconds flush_interval);
  /// Adds the line that tells a run that ended from one that was cut off.
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
  int exceptions_;  ///< under way when the file was opened
};

}  // namespace lockstep
