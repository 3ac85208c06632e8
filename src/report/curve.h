#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace lockstep {

/// Values over steps in bounded memory: if there are more than kMostPoints, neighbours are merged, keeping their mean,
/// minimum and maximum.
class Curve {
 public:
  static constexpr size_t kMostPoints = 4096;

  struct Point {
    double x = 0;  ///< mean of the steps
    double mean = 0, least = 0, greatest = 0;
    double last = 0;
    int64_t count = 0;
  };

  /// A value that is not a number, or is beyond 1e150, is counted but not kept as a point.
  void add(double x, double value);
  /// Forgets values of steps after `x`, from which the training resumed.
  void forget_after(double x);

  /// Sorted by x, ascending.
  const std::vector<Point>& points() const { return points_; }
  bool empty() const { return points_.empty(); }
  int64_t count() const { return count_; }
  /// Number of values that were NaN or infinite.
  int64_t not_finite() const { return not_finite_; }
  double first_not_finite() const { return first_not_finite_; }

 private:
  void merge_neighbours();

  std::vector<Point> points_;
  int64_t per_point_ = 1;
  int64_t count_ = 0;
  int64_t not_finite_ = 0;
  double first_not_finite_ = 0;
};

std::vector<Curve::Point> thinned(const std::vector<Curve::Point>& points, size_t most);

/// Means over a window of `width` points around each, fewer at the ends.
std::vector<Curve::Point> smoothed(std::vector<Curve::Point> points, size_t width);

}  // namespace lockstep
