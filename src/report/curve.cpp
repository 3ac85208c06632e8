#include "report/curve.h"

#include <algorithm>
#include <cmath>

namespace lockstep {
namespace {

/// Practically infinite: sums and differences of anything smaller are finite.
constexpr double kMostValue = 1e150;
/// Practically zero: a tenth of anything larger is still a different number.
constexpr double kLeastValue = 1e-150;

Curve::Point together(const Curve::Point& one, const Curve::Point& other) {
  const auto a = static_cast<double>(one.count), b = static_cast<double>(other.count);
  return {.x = (one.x * a + other.x * b) / (a + b),
          .mean = (one.mean * a + other.mean * b) / (a + b),
          .least = std::min(one.least, other.least),
          .greatest = std::max(one.greatest, other.greatest),
          .last = other.last,
          .count = one.count + other.count};
}

}  // namespace

void Curve::add(double x, double value) {
  if (!std::isfinite(x)) return;
  if (!(std::fabs(value) < kMostValue)) {
    if (not_finite_++ == 0) first_not_finite_ = x;
    return;
  }
  if (std::fabs(value) < kLeastValue) value = 0;
  ++count_;
  const Point point{.x = x, .mean = value, .least = value, .greatest = value, .last = value, .count = 1};
  if (!points_.empty() && x < points_.back().x) {
    points_.insert(std::upper_bound(points_.begin(), points_.end(), x,
                                    [](double step, const Point& there) { return step < there.x; }),
                   point);
  } else if (!points_.empty() && points_.back().count < per_point_) {
    points_.back() = together(points_.back(), point);
  } else {
    points_.push_back(point);
  }
  if (points_.size() > kMostPoints) merge_neighbours();
}

void Curve::forget_after(double x) {
  while (!points_.empty() && points_.back().x > x) {
    count_ -= points_.back().count;
    points_.pop_back();
  }
  if (not_finite_ > 0 && first_not_finite_ > x) not_finite_ = 0;
}

void Curve::merge_neighbours() {
  points_ = thinned(points_, (points_.size() + 1) / 2);
  per_point_ *= 2;
}

std::vector<Curve::Point> thinned(const std::vector<Curve::Point>& points, size_t most) {
  if (points.size() <= most || most == 0) return points;
  const size_t group = (points.size() + most - 1) / most;
  std::vector<Curve::Point> fewer;
  for (size_t i = 0; i < points.size(); ++i) {
    if (i % group == 0)
      fewer.push_back(points[i]);
    else
      fewer.back() = together(fewer.back(), points[i]);
  }
  return fewer;
}

std::vector<Curve::Point> smoothed(std::vector<Curve::Point> points, size_t width) {
  if (width < 2) return points;
  std::vector<double> sums{0};
  for (const Curve::Point& point : points) sums.push_back(sums.back() + point.mean);
  const size_t half = width / 2;
  for (size_t i = 0; i < points.size(); ++i) {
    const size_t reach = std::min({half, i, points.size() - 1 - i});
    points[i].mean = (sums[i + reach + 1] - sums[i - reach]) / static_cast<double>(2 * reach + 1);
  }
  return points;
}

}  // namespace lockstep
