#include "report/line_chart.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "observe/json_text.h"
#include "report/axis.h"
#include "report/text.h"

namespace lockstep {
namespace {

constexpr size_t kFewPoints = 40;      // are also drawn as dots
constexpr size_t kSmoothedAbove = 60;  // points on the drawing
constexpr size_t kWindows = 30;        // of smoothing, side by side

struct Range {
  double low, high;
};

/// A line as drawn: at most one point every two pixels.
struct DrawnLine {
  const ChartLine* line;
  std::vector<Curve::Point> points;
  std::vector<Curve::Point> main;  ///< smoothed, or unchanged
  size_t window = 1;               ///< number of points averaged for each point of `main`
  bool has_band = false;
};

size_t most_points(const DrawingSize& size) { return static_cast<size_t>(size.width / 2); }
size_t window_of(size_t points) { return points > kSmoothedAbove ? points / kWindows : 1; }

double quantile(std::vector<double> values, double part) {
  if (values.empty()) return 0;
  const auto place = values.begin() + static_cast<ptrdiff_t>(part * static_cast<double>(values.size() - 1));
  std::nth_element(values.begin(), place, values.end());
  return *place;
}

/// Whether the points vary more than a smooth curve would, so that smoothing shows more than it hides.
bool is_noisy(const std::vector<Curve::Point>& points, double height) {
  double way = 0;
  for (size_t i = 1; i < points.size(); ++i) way += std::fabs(points[i].mean - points[i - 1].mean);
  return way > 4 * height;
}

/// Whether the values merged into one point differ by more than the curve's own slope.
bool is_spread(const std::vector<Curve::Point>& points, double height) {
  std::vector<double> spreads;
  for (const Curve::Point& point : points) spreads.push_back(point.greatest - point.least);
  return quantile(std::move(spreads), 0.5) > 0.02 * height;
}

DrawnLine drawn(const ChartLine& line, const DrawingSize& size) {
  DrawnLine one{.line = &line, .points = thinned(line.points, most_points(size)), .main = {}};
  Range means{one.points.front().mean, one.points.front().mean};
  for (const Curve::Point& point : one.points)
    means = {std::min(means.low, point.mean), std::max(means.high, point.mean)};
  const double height = means.high - means.low;
  if (is_noisy(one.points, height)) one.window = window_of(one.points.size());
  one.has_band = one.window > 1 || is_spread(one.points, height);
  one.main = smoothed(one.points, one.window);
  return one;
}

/// The range of the axis: the lines as drawn and all but the few farthest points behind a smoothed line.
Range range_of(const std::vector<DrawnLine>& lines, bool from_zero) {
  Range range{std::numeric_limits<double>::infinity(), -std::numeric_limits<double>::infinity()};
  const auto cover = [&](double value) { range = {std::min(range.low, value), std::max(range.high, value)}; };
  for (const DrawnLine& line : lines) {
    for (const Curve::Point& point : line.main) cover(point.mean);
    if (!line.has_band) continue;
    std::vector<double> least, greatest;
    for (const Curve::Point& point : line.points) least.push_back(point.least), greatest.push_back(point.greatest);
    cover(quantile(std::move(least), 0.02));
    cover(quantile(std::move(greatest), 0.98));
  }
  if (from_zero) cover(0);
  if (range.high - range.low < 1e-9 * std::max(std::fabs(range.low), std::fabs(range.high)) ||
      range.high == range.low) {
    const double margin = range.low == 0 ? 1 : std::fabs(range.low) * 0.1;
    range = {from_zero && range.low == 0 ? 0 : range.low - margin, range.high + margin};
  }
  return range;
}

bool is_logarithmic(const LineChart& chart, Range range) {
  if (range.low <= 0 || chart.from_zero || chart.share) return false;
  const double ratio = range.high / range.low;
  return ratio > (chart.falls ? 8 : 100) && ratio < 1e100;
}

/// Makes the axis a little wider than the values, but not beyond their natural bounds.
Scale vertical_scale(Range range, const LineChart& chart, double bottom, double top) {
  if (is_logarithmic(chart, range)) return {range.low / 1.1, range.high * 1.1, bottom, top, true};
  const double margin = (range.high - range.low) * 0.06;
  double low = range.low - margin, high = range.high + margin;
  if (range.low >= 0 && (low < 0 || chart.from_zero)) low = 0;
  if (chart.share && range.high <= 1) high = std::min(high, 1.0);
  return {low, high, bottom, top};
}

std::string points_attribute(const std::vector<Curve::Point>& points, const Scale& x, const Scale& y) {
  std::string text;
  for (const Curve::Point& point : points) {
    if (!text.empty()) text += ' ';
    text += px(x(point.x)) + "," + px(y(point.mean));
  }
  return text;
}

void draw_line(Svg& svg, const DrawnLine& line, const Scale& x, const Scale& y) {
  std::string colour(1, 'c');
  colour += std::to_string(line.line->colour);
  if (line.has_band) {
    std::string band;
    for (const Curve::Point& point : line.points) band += px(x(point.x)) + "," + px(y(point.greatest)) + " ";
    for (auto point = line.points.rbegin(); point != line.points.rend(); ++point)
      band += px(x(point->x)) + "," + px(y(point->least)) + " ";
    svg.raw("<polygon class=\"band " + colour + "\" points=\"" + band + "\"/>");
  }
  svg.raw("<polyline class=\"line " + colour + "\" data-name=\"" + html(line.line->name) + "\" points=\"" +
          points_attribute(line.main, x, y) + "\"/>");
  if (line.points.size() <= kFewPoints)
    for (const Curve::Point& point : line.points) svg.circle("dot " + colour, x(point.x), y(point.mean), 2.5);
}

/// Where epochs begin, if there are few.
void draw_epochs(Svg& svg, const LineChart& chart, const Scale& x, const Scale& y) {
  if (chart.epochs.size() < 2 || chart.epochs.size() > 25) return;
  double free_from = x.low_px();
  for (const auto& [epoch, step] : chart.epochs) {
    const double place = x(static_cast<double>(step));
    if (place > x.low_px() + 1) svg.line("epoch", place, y.high_px() - 14, place, y.low_px());
    const std::string label = "epoch " + std::to_string(epoch + 1);
    if (place + 3 < free_from || place + 6 + text_width(label) > x.high_px()) continue;
    svg.text("small", place + 2, y.high_px() - 6, "start", label);
    free_from = place + 12 + text_width(label);
  }
}

void draw_axes(Svg& svg, const std::vector<Tick>& across, const std::vector<Tick>& up, const Scale& x, const Scale& y) {
  for (const Tick& tick : up) {
    svg.line("grid", x.low_px(), y(tick.value), x.high_px(), y(tick.value));
    svg.text("tick", x.low_px() - 7, y(tick.value) + 4, "end", tick.label);
  }
  svg.line("axis", x.low_px(), y.low_px(), x.high_px(), y.low_px());
  for (const Tick& tick : across) {
    const double place = x(tick.value);
    svg.line("axis", place, y.low_px(), place, y.low_px() + 4);
    const double half = text_width(tick.label) / 2;
    svg.text("tick", std::min(place, x.high_px() + 8 - half), y.low_px() + 17, "middle", tick.label);
  }
  svg.text("tick", (x.low_px() + x.high_px()) / 2, y.low_px() + 33, "middle", "step");
}

/// Steps, from 0 unless they begin far from it.
Scale horizontal_scale(const std::vector<DrawnLine>& lines, double left, double right) {
  Range steps{std::numeric_limits<double>::infinity(), 0};
  for (const DrawnLine& line : lines)
    steps = {std::min(steps.low, line.points.front().x), std::max(steps.high, line.points.back().x)};
  if (steps.low < 0.1 * steps.high) steps.low = 0;
  if (steps.high <= steps.low) steps = {steps.low - 1, steps.high + 1};
  return {steps.low, steps.high, left, right};
}

/// For the page's script: the values at both ends of the axis, and their positions.
std::string scale_attribute(const Scale& scale) {
  std::string text;
  for (const double value : {scale.low(), scale.high()}) {
    append_json(text, value);
    text += ' ';
  }
  return text + px(scale.low_px()) + " " + px(scale.high_px());
}

}  // namespace

Smoothing smoothing_of(const ChartLine& line, const DrawingSize& size) {
  if (line.points.empty()) return {};
  const DrawnLine one = drawn(line, size);
  const size_t count = one.points.size(), window = std::min(one.window / 2 * 2 + 1, count);
  if (!one.has_band || count < 2) return {.steps = 0, .last = line.points.back().last};
  const double steps = (one.points.back().x - one.points.front().x) / static_cast<double>(count - 1);
  double sum = 0;
  for (size_t i = count - window; i < count; ++i) sum += one.points[i].mean;
  return {.steps = std::max(1.0, std::round(steps * static_cast<double>(window))),
          .last = sum / static_cast<double>(window)};
}

bool has_logarithmic_axis(const LineChart& chart, const DrawingSize& size) {
  std::vector<DrawnLine> lines;
  for (const ChartLine& line : chart.lines)
    if (!line.points.empty()) lines.push_back(drawn(line, size));
  return !lines.empty() && is_logarithmic(chart, range_of(lines, chart.from_zero));
}

std::string draw_line_chart(const LineChart& chart, const DrawingSize& size) {
  std::vector<DrawnLine> lines;
  for (const ChartLine& line : chart.lines)
    if (!line.points.empty()) lines.push_back(drawn(line, size));
  if (lines.empty()) return "";

  const double top = chart.epochs.size() > 1 ? 18 : 8, bottom = size.height - 40;
  const Scale y = vertical_scale(range_of(lines, chart.from_zero), chart, bottom, top);
  const std::vector<Tick> up =
      y.is_logarithmic() ? logarithmic_ticks(y.low(), y.high()) : ticks(y.low(), y.high(), 5, false, chart.share);
  double labels = 0;
  for (const Tick& tick : up) labels = std::max(labels, text_width(tick.label));
  const Scale x = horizontal_scale(lines, labels + 10, size.width - 8);

  Svg svg(size, chart.title + " over steps",
          "data-x=\"" + scale_attribute(x) + "\" data-y=\"" + scale_attribute(y) + "\" data-kind=\"" +
              (y.is_logarithmic() ? "log"
               : chart.share      ? "share"
                                  : "plain") +
              "\"");
  const std::string clip = chart.id + "-" + size.layout;
  svg.raw("<clipPath id=\"" + clip + "\"><rect x=\"" + px(x.low_px()) + "\" y=\"" + px(top - 3) + "\" width=\"" +
          px(x.high_px() - x.low_px() + 4) + "\" height=\"" + px(bottom - top + 6) + "\"/></clipPath>");
  draw_axes(svg, ticks(x.low(), x.high(), static_cast<int>(size.width / 70), true), up, x, y);
  draw_epochs(svg, chart, x, y);
  svg.raw("<g clip-path=\"url(#" + clip + ")\">");
  for (const DrawnLine& line : lines) draw_line(svg, line, x, y);
  svg.raw("</g>");
  return svg.finish();
}

}  // namespace lockstep
