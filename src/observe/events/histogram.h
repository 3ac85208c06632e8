#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// Counts of values in the buckets of TensorBoard's own writers: limits 1e-12 * 1.1^k up to 1e20, zero, and their
/// negatives. Only the buckets between the first and the last value are kept, with an empty one before them, because a
/// bucket is given by its upper limit alone. Equal to the output of PyTorch's add_histogram.
struct Histogram {
  double min = 0, max = 0;
  int64_t count = 0;
  double sum = 0, sum_of_squares = 0;
  std::vector<double> limits;  ///< upper ones
  std::vector<double> counts;
};

/// NaN is left out. Infinities are counted in the outermost buckets and left out of the sums. Values: float, double.
template <typename Value>
Histogram make_histogram(const Value* values, int64_t count);

}  // namespace lockstep
