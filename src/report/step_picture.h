#pragma once

#include <istream>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// A span of a trace, in microseconds of the machine's clock.
struct TraceSpan {
  std::string name;  ///< "backward", "wait", "bucket 2"
  double begin_us = 0, end_us = 0;
};

/// Spans by reduction.
using TraceOfRank = std::map<int64_t, std::vector<TraceSpan>>;

/// Reads a trace file as chrome_trace() writes it, even if it was cut off. Throws Error with the reason if it is not
/// one, or is too long to be read whole.
TraceOfRank read_trace(std::istream& in);

/// One reduction on the ranks that traced it.
struct StepPicture {
  int64_t reduction = 0;
  double begin_us = 0, end_us = 0;
  std::map<int, std::vector<TraceSpan>> ranks;
};

/// The reduction with the median duration among those that all these ranks traced; nothing if there is none.
std::optional<StepPicture> usual_step(const std::map<int, TraceOfRank>& traces);

/// Lanes over time: each rank's backward and waiting, and its buckets.
std::string draw_step(const StepPicture& step, double width, const char* layout);

/// The most of each that are drawn; the page says how many are left out.
constexpr size_t kMostStepRanks = 8, kMostStepBuckets = 12;

}  // namespace lockstep
