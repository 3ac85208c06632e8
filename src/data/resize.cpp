#include "data/resize.h"

#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

namespace lockstep {
namespace {

/// The old values that form a new value: `weights` for the values from `first` on.
struct Taps {
  int64_t first;
  std::vector<float> weights;
};

/// The taps of `count` new values over `length` of `size` old ones, from `start` on.
std::vector<Taps> taps_of(int64_t size, double start, double length, int64_t count) {
  const double scale = length / static_cast<double>(count);
  const double radius = std::max(scale, 1.0);
  std::vector<Taps> all(static_cast<size_t>(count));
  for (int64_t i = 0; i < count; ++i) {
    const double centre = start + (static_cast<double>(i) + 0.5) * scale;
    const int64_t first = std::clamp<int64_t>(std::llround(std::floor(centre - radius + 0.5)), 0, size - 1);
    const int64_t end = std::clamp<int64_t>(std::llround(std::floor(centre + radius + 0.5)), first + 1, size);
    Taps& taps = all[static_cast<size_t>(i)];
    taps.first = first;
    double sum = 0;
    std::vector<double> weights;
    for (int64_t at = first; at < end; ++at) {
      const double distance = std::abs((static_cast<double>(at) + 0.5 - centre) / radius);
      weights.push_back(std::max(0.0, 1 - distance));
      sum += weights.back();
    }
    // At the edge of a box there may be no pixel centre within reach.
    if (sum == 0) weights[0] = sum = 1;
    for (const double weight : weights) taps.weights.push_back(static_cast<float>(weight / sum));
  }
  return all;
}

template <typename T>
T rounded(float value) {
  if constexpr (std::is_same_v<T, uint8_t>)
    return static_cast<uint8_t>(std::clamp(value + 0.5f, 0.0f, 255.0f));
  else
    return value;
}

template <typename T>
void resize_plane(const Plane<const T>& from, const Box& box, const Plane<T>& to) {
  const std::vector<Taps> columns = taps_of(from.width, box.left, box.width, to.width);
  const std::vector<Taps> rows = taps_of(from.height, box.top, box.height, to.height);
  const int64_t first = rows.front().first;
  int64_t end = first;
  for (const Taps& taps : rows) end = std::max(end, taps.first + static_cast<int64_t>(taps.weights.size()));
  std::vector<float> narrow(static_cast<size_t>((end - first) * to.width));
  for (int64_t y = first; y < end; ++y) {
    const T* row = from.values + y * from.stride;
    float* out = narrow.data() + (y - first) * to.width;
    for (int64_t x = 0; x < to.width; ++x) {
      const Taps& taps = columns[static_cast<size_t>(x)];
      const T* value = row + taps.first * from.step;
      float sum = 0;
      for (const float weight : taps.weights) {
        sum += weight * static_cast<float>(*value);
        value += from.step;
      }
      out[x] = sum;
    }
  }
  std::vector<float> sums(static_cast<size_t>(to.width));
  for (int64_t y = 0; y < to.height; ++y) {
    const Taps& taps = rows[static_cast<size_t>(y)];
    std::fill(sums.begin(), sums.end(), 0.0f);
    for (size_t i = 0; i < taps.weights.size(); ++i) {
      const float* row = narrow.data() + (taps.first - first + static_cast<int64_t>(i)) * to.width;
      for (int64_t x = 0; x < to.width; ++x) sums[static_cast<size_t>(x)] += taps.weights[i] * row[x];
    }
    T* out = to.values + y * to.stride;
    for (int64_t x = 0; x < to.width; ++x) out[x * to.step] = rounded<T>(sums[static_cast<size_t>(x)]);
  }
}

}  // namespace

void resize(const Plane<const uint8_t>& from, const Box& box, const Plane<uint8_t>& to) { resize_plane(from, box, to); }
void resize(const Plane<const float>& from, const Box& box, const Plane<float>& to) { resize_plane(from, box, to); }

}  // namespace lockstep
