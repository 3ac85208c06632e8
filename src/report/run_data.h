#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "report/curve.h"
#include "report/starts.h"

namespace lockstep {

/// One bucket's times in the recorded reductions, in milliseconds since the first gradient.
struct BucketTimes {
  std::string first_parameter, last_parameter;
  int64_t parameters = 0;
  int64_t bytes = 0;
  std::vector<float> ready_ms, start_ms, end_ms, wait_ms;
};

/// The lines of one rank.
struct RankData {
  int rank = 0;
  Curve steps_per_second;
  Curve communication_share;
  int64_t steps = 0, samples = 0;
  double seconds = 0, communication_s = 0;
  double begin_wall_s = 0, last_wall_s = 0;
  int64_t last_step = 0;
  std::string ended_by;  ///< "return", "exception", or empty: there is no last line
  int64_t lost_lines = 0;
  int64_t unreadable_lines = 0;
};

/// The reductions of the lowest rank in the folder, and all ranks' statements about each other.
struct ReductionData {
  int64_t reductions = 0;
  double backward_ms = 0, wait_ms = 0, overlap = 0;  ///< means
  std::vector<BucketTimes> buckets;
  std::vector<double> wait_ms_by_rank;
  std::vector<int64_t> times_last_by_rank;
};

/// How and where the run was started; for the last start.
struct StartData {
  int world_size = 0;
  int threads = 0;
  int usable_cores = 0;
  int64_t memory_bytes = 0;
  std::string backend, host, system, kernel, cpu, folder;
  std::vector<std::string> command;
  std::vector<std::pair<std::string, std::string>> versions;
};

/// A run, as far as its files describe it.
struct RunData {
  std::vector<RankData> ranks;  ///< by rank; empty: only event files were found
  StartData start;
  int64_t starts = 0;                    ///< more than one: it was resumed
  std::vector<TeamData> teams;           ///< the launcher's starts; empty: it started once, or was not used
  std::map<std::string, Curve> scalars;  ///< of the lowest rank, by name
  std::map<int64_t, int64_t> epochs;     ///< first step of each epoch
  ReductionData reductions;
  std::map<std::string, int64_t> summaries;  ///< contents of event files besides scalars: "histograms", their number
  std::vector<std::string> notes;            ///< unreadable parts
};

/// Reads metrics_rank<r>.jsonl of a folder or, if there are none, TensorBoard's event files in it and in its folder
/// tensorboard. Unreadable lines and records are counted and left out. Throws Error if there are no files.
RunData read_run(const std::string& folder);

/// Adds one rank's lines. Also used by the fuzzer and tests.
void read_metrics(std::istream& in, int rank, RunData& run);
/// Adds an event file.
void read_events(std::istream& in, const std::string& name, RunData& run);

}  // namespace lockstep
