#include "report/bar_charts.h"

#include <algorithm>
#include <numeric>

#include "report/axis.h"
#include "report/text.h"

namespace lockstep {
namespace {

constexpr double kRow = 38, kBarHeight = 12, kHead = 22, kAxisFoot = 40;

/// The median times of one bucket.
struct Usual {
  double ready, start, end;
};

Usual usual(const BucketTimes& bucket) {
  Usual times{median(bucket.ready_ms), median(bucket.start_ms), median(bucket.end_ms)};
  times.start = std::max(times.start, times.ready);
  times.end = std::max(times.end, times.start);
  return times;
}

std::string parameters_of(const BucketTimes& bucket) {
  if (bucket.parameters <= 1) return bucket.first_parameter;
  return bucket.first_parameter + (bucket.parameters == 2 ? " and " : " to ") + bucket.last_parameter;
}

void draw_bucket(Svg& svg, const BucketTimes& bucket, size_t number, const Scale& x, double y) {
  const Usual times = usual(bucket);
  const std::string size = byte_size(bucket.bytes);
  const std::string name = "bucket " + std::to_string(number);
  const double right = x.high_px();
  svg.text("label", x.low_px(), y + 12, "start", name);
  const double name_end = x.low_px() + text_width(name) + 14, size_start = right - text_width(size) - 10;
  svg.text("small", name_end, y + 12, "start", fitted(parameters_of(bucket), size_start - name_end));
  svg.text("label", right, y + 12, "end", size);
  const std::string told = name + ", " + size + ", " + counted(bucket.parameters, "parameter") + " (" +
                           parameters_of(bucket) + "): ready after " + milliseconds(times.ready) +
                           ", handed over after " + milliseconds(times.start) + ", reduced after " +
                           milliseconds(times.end);
  const double bar = y + 18;
  svg.rect("arrive", x(0), bar + kBarHeight / 2 - 1, x(times.ready) - x(0), 2, told);
  if (times.start > times.ready)
    svg.rect("queued", x(times.ready), bar + 3, x(times.start) - x(times.ready), kBarHeight - 6, told);
  svg.rect("reduce", x(times.start), bar, std::max(x(times.end) - x(times.start), 2.0), kBarHeight, told);
  svg.rect("ready", x(times.ready) - 1, bar - 2, 2, kBarHeight + 4, told);
}

}  // namespace

void draw_bottom_axis(Svg& svg, const Scale& x, const std::vector<Tick>& marks, double bottom, std::string_view unit) {
  svg.line("axis", x.low_px(), bottom, x.high_px(), bottom);
  for (const Tick& tick : marks) {
    svg.line("axis", x(tick.value), bottom, x(tick.value), bottom + 4);
    const double half = text_width(tick.label) / 2;
    svg.text("tick", std::clamp(x(tick.value), half, x.high_px() + 6 - half), bottom + 17, "middle", tick.label);
  }
  svg.text("tick", (x.low_px() + x.high_px()) / 2, bottom + 33, "middle", unit);
}

double median(std::vector<float> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

double backward_end_ms(const ReductionData& reductions) {
  if (reductions.buckets.empty()) return 0;
  std::vector<float> ends = reductions.buckets.front().end_ms;
  const std::vector<float>& waits = reductions.buckets.front().wait_ms;
  for (size_t i = 0; i < ends.size() && i < waits.size(); ++i) ends[i] = std::max(ends[i] - waits[i], 0.0f);
  return median(std::move(ends));
}

std::string draw_buckets(const ReductionData& reductions, double width, const char* layout) {
  const size_t count = std::min(reductions.buckets.size(), kMostBucketsDrawn);
  const double backward = backward_end_ms(reductions);
  double longest = std::max(backward, 1e-3);
  for (size_t b = 0; b < count; ++b) longest = std::max(longest, usual(reductions.buckets[b]).end);
  const double bottom = kHead + static_cast<double>(count) * kRow;
  const Scale x(0, longest * 1.02, 2, width - 2);
  Svg svg({layout, width, bottom + kAxisFoot}, "When each bucket is ready and reduced");
  const std::vector<Tick> marks = ticks(0, x.high(), static_cast<int>(width / 70));
  for (const Tick& tick : marks) svg.line("grid", x(tick.value), kHead, x(tick.value), bottom);
  if (backward > 0) {
    svg.rect("still", x(backward), kHead, x.high_px() - x(backward), bottom - kHead);
    svg.line("mark", x(backward), kHead - 4, x(backward), bottom);
    const std::string label = "backward ends, " + milliseconds(backward);
    const bool fits_left = text_width(label) < x(backward);
    svg.text("small", x(backward) + (fits_left ? -4 : 4), kHead - 9, fits_left ? "end" : "start", label);
  }
  for (size_t b = 0; b < count; ++b)
    draw_bucket(svg, reductions.buckets[b], b + 1, x, kHead + static_cast<double>(b) * kRow);
  draw_bottom_axis(svg, x, marks, bottom, "milliseconds since the first gradient of a step");
  return svg.finish();
}

std::string draw_late_ranks(const ReductionData& reductions, double width, const char* layout) {
  const std::vector<int64_t>& times = reductions.times_last_by_rank;
  const double total = static_cast<double>(std::accumulate(times.begin(), times.end(), int64_t{0}));
  std::vector<size_t> ranks(times.size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (ranks.size() > kMostRanksDrawn) {
    std::stable_sort(ranks.begin(), ranks.end(), [&](size_t one, size_t other) { return times[one] > times[other]; });
    ranks.resize(kMostRanksDrawn);
  }
  const double bottom = static_cast<double>(ranks.size()) * kRow;
  const Scale x(0, 1, 2, width - 2);
  Svg svg({layout, width, bottom + kAxisFoot}, "How often each rank came last");
  const std::vector<Tick> marks = ticks(0, 1, 4, false, true);
  for (const Tick& tick : marks) svg.line("grid", x(tick.value), 4, x(tick.value), bottom);
  for (size_t i = 0; i < ranks.size(); ++i) {
    const size_t rank = ranks[i];
    const double y = static_cast<double>(i) * kRow, share = total > 0 ? static_cast<double>(times[rank]) / total : 0;
    svg.text("label", x(0), y + 12, "start", "rank " + std::to_string(rank));
    std::string told = "last in " + percent(share);
    if (rank < reductions.wait_ms_by_rank.size())
      told += ", waits " + milliseconds(reductions.wait_ms_by_rank[rank]) + " a step";
    svg.text("small", x(1), y + 12, "end", told);
    svg.rect("late", x(0), y + 18, std::max(x(share) - x(0), 1.0), kBarHeight, told);
  }
  draw_bottom_axis(svg, x, marks, bottom, "share of steps in which the rank came last");
  return svg.finish();
}

}  // namespace lockstep
