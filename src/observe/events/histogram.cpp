#include "observe/events/histogram.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lockstep {
namespace {

/// Limits above zero, with the same accumulation of rounding errors as in TensorBoard's writers.
const std::vector<double>& positive_limits() {
  static const std::vector<double> limits = [] {
    std::vector<double> made;
    for (double limit = 1e-12; limit < 1e20; limit *= 1.1) made.push_back(limit);
    return made;
  }();
  return limits;
}

/// All limits, ascending. Bucket b holds limits[b] <= value < limits[b + 1]; the last one also holds its upper limit.
std::vector<double> all_limits() {
  const std::vector<double>& positive = positive_limits();
  std::vector<double> limits;
  for (auto limit = positive.rbegin(); limit != positive.rend(); ++limit) limits.push_back(-*limit);
  limits.push_back(0);
  limits.insert(limits.end(), positive.begin(), positive.end());
  return limits;
}

/// The number of limits above zero that are <= value, or < value. Estimated by the logarithm, then corrected.
size_t limits_below(double value, bool or_equal) {
  const std::vector<double>& limits = positive_limits();
  if (!(value >= limits.front())) return 0;
  static const double scale = 1 / std::log(1.1);
  const double guess = std::log(value / 1e-12) * scale;
  size_t index = static_cast<size_t>(std::clamp(guess, 0.0, static_cast<double>(limits.size())));
  const auto is_below = [&](double limit) { return or_equal ? limit <= value : limit < value; };
  while (index > 0 && !is_below(limits[index - 1])) --index;
  while (index < limits.size() && is_below(limits[index])) ++index;
  return index;
}

size_t bucket_of(double value) {
  const size_t positive = positive_limits().size(), last = 2 * positive - 1;
  if (value >= 0) return std::min(positive + limits_below(value, true), last);
  const size_t below = limits_below(-value, false);
  return below >= positive ? 0 : positive - 1 - below;
}

}  // namespace

template <typename Value>
Histogram make_histogram(const Value* values, int64_t count) {
  static const std::vector<double> limits = all_limits();
  Histogram histogram;
  std::vector<int64_t> counts(limits.size() - 1);
  histogram.min = std::numeric_limits<double>::infinity();
  histogram.max = -histogram.min;
  for (int64_t i = 0; i < count; ++i) {
    const double value = static_cast<double>(values[i]);
    if (std::isnan(value)) continue;
    ++counts[bucket_of(value)];
    ++histogram.count;
    if (std::isinf(value)) continue;
    histogram.min = std::min(histogram.min, value);
    histogram.max = std::max(histogram.max, value);
    histogram.sum += value;
    histogram.sum_of_squares += value * value;
  }
  if (histogram.min > histogram.max) histogram.min = histogram.max = 0;
  size_t first = 0, end = counts.size();
  while (first < end && counts[first] == 0) ++first;
  while (end > first && counts[end - 1] == 0) --end;
  if (first == end) {  // NaN alone
    histogram.limits = {0};
    histogram.counts = {0};
    return histogram;
  }
  histogram.limits.push_back(limits[first]);
  histogram.counts.push_back(0);
  for (size_t b = first; b < end; ++b) {
    histogram.limits.push_back(limits[b + 1]);
    histogram.counts.push_back(static_cast<double>(counts[b]));
  }
  return histogram;
}

template Histogram make_histogram(const float*, int64_t);
template Histogram make_histogram(const double*, int64_t);

}  // namespace lockstep
