#include <lockstep/loader_stats.h>

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

std::string remedy(const LoaderStats& stats) {
  if (stats.workers == 0) return "a worker would prepare batches while the loop computes (workers = 1)";
  const std::string now = " (now " + std::to_string(stats.workers) + ")";
  const double busy = (stats.reading_seconds + stats.transform_seconds) / (stats.workers * stats.seconds);
  constexpr double kSaturated = 0.75;
  if (busy >= kSaturated) return "more workers" + now + " may help";
  return "the workers were busy only " + std::to_string(std::lround(100 * busy)) +
         " % of it, so a larger prefetch, or fewer and longer passes, may help more than more workers" + now;
}

}  // namespace

std::string LoaderStats::advice() const {
  constexpr double kWorthSaying = 0.05;
  if (seconds <= 0 || waiting_seconds < kWorthSaying * seconds) return "";
  const double share = std::min(1.0, waiting_seconds / seconds);
  const char* slow = transform_seconds > reading_seconds ? "transforms" : "reading";
  return "training waited " + std::to_string(std::lround(100 * share)) +
         " % of the epoch for data; most of the loader's time is " + slow + "; " + remedy(*this);
}

}  // namespace lockstep
