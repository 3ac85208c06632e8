#include "report/step_picture.h"

#include <lockstep/error.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>

#include "report/axis.h"
#include "report/bar_charts.h"
#include "report/svg.h"
#include "report/text.h"

namespace lockstep {
namespace {

using nlohmann::json;

constexpr size_t kMostTraceBytes = 16 << 20, kMostSpans = 100'000;
constexpr double kLane = 16, kThinLane = 8, kRankHead = 20, kRankFoot = 10, kFoot = 40;

std::string read_bounded(std::istream& in) {
  std::string text(kMostTraceBytes + 1, '\0');
  in.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(in.gcount()));
  if (text.size() > kMostTraceBytes) throw Error("it is longer than 16 MiB");
  return text;
}

/// The list, closed after its last complete event if the program could not close it.
json parse_trace(const std::string& text) {
  json events = json::parse(text, nullptr, /*allow_exceptions=*/false);
  const size_t end = text.rfind(",\n");
  if (events.is_discarded() && end != std::string::npos)
    events = json::parse(text.substr(0, end) + "]", nullptr, /*allow_exceptions=*/false);
  return events;
}

double microseconds(const json& event, const char* name) {
  const auto member = event.find(name);
  const double value = member != event.end() && member->is_number() ? member->get<double>() : NAN;
  return std::isfinite(value) && std::fabs(value) < 1e18 ? value : NAN;
}

int64_t reduction_of(const json& event) {
  const auto args = event.find("args");
  if (args == event.end() || !args->is_object()) return -1;
  const auto reduction = args->find("reduction");
  if (reduction == args->end() || !reduction->is_string()) return -1;
  const std::string& text = reduction->get_ref<const std::string&>();
  if (text.empty() || text.size() > 15 || text.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoll(text);
}

/// From the first span to the last; nothing for a reduction without "backward".
std::optional<std::pair<double, double>> extent(const std::vector<TraceSpan>& spans) {
  std::optional<std::pair<double, double>> found;
  double end = 0;
  for (const TraceSpan& span : spans) {
    if (span.name == "backward") found = {span.begin_us, span.end_us};
    end = std::max(end, span.end_us);
  }
  if (found) found->second = std::max(found->second, end);
  return found;
}

std::vector<const TraceSpan*> buckets_of(const std::vector<TraceSpan>& spans) {
  std::vector<const TraceSpan*> buckets;
  for (const TraceSpan& span : spans)
    if (span.name.starts_with("bucket ") && buckets.size() < kMostStepBuckets) buckets.push_back(&span);
  return buckets;
}

double height_of(const std::vector<TraceSpan>& spans) {
  return kRankHead + kLane + 4 + kThinLane * static_cast<double>(buckets_of(spans).size()) + kRankFoot;
}

void draw_rank(Svg& svg, int rank, const std::vector<TraceSpan>& spans, const Scale& x, double y) {
  svg.text("label", x.low_px(), y + 13, "start", "rank " + std::to_string(rank));
  y += kRankHead;
  const auto draw = [&](const char* css, const TraceSpan& span, double top, double height) {
    const double begin = x(span.begin_us), end = x(span.end_us);
    svg.rect(
        css, begin, top, std::max(end - begin, 1.0), height,
        span.name + " on rank " + std::to_string(rank) + ": " + milliseconds((span.end_us - span.begin_us) / 1000));
  };
  for (const TraceSpan& span : spans) {
    if (span.name == "backward") draw("compute", span, y, kLane);
    if (span.name == "wait") draw("wait", span, y, kLane);
  }
  y += kLane + 4;
  for (const TraceSpan* bucket : buckets_of(spans)) {
    draw("reduce", *bucket, y, kThinLane - 2);
    y += kThinLane;
  }
}

}  // namespace

TraceOfRank read_trace(std::istream& in) {
  const json events = parse_trace(read_bounded(in));
  if (!events.is_array()) throw Error("it is not a list of events");
  TraceOfRank trace;
  size_t count = 0;
  for (const json& event : events) {
    if (!event.is_object() || !event.contains("name") || !event["name"].is_string()) continue;
    const double begin = microseconds(event, "ts"), taken = microseconds(event, "dur");
    const int64_t reduction = reduction_of(event);
    if (std::isnan(begin) || std::isnan(taken) || taken < 0 || reduction < 0 || ++count > kMostSpans) continue;
    trace[reduction].push_back({event["name"].get<std::string>().substr(0, 100), begin, begin + taken});
  }
  return trace;
}

std::optional<StepPicture> usual_step(const std::map<int, TraceOfRank>& traces) {
  std::vector<StepPicture> steps;
  if (traces.empty()) return std::nullopt;
  for (const auto& [reduction, first_spans] : traces.begin()->second) {
    StepPicture step{.reduction = reduction, .begin_us = INFINITY, .end_us = -INFINITY, .ranks = {}};
    for (const auto& [rank, trace] : traces) {
      const auto spans = trace.find(reduction);
      const auto time = spans != trace.end() ? extent(spans->second) : std::nullopt;
      if (!time) break;
      step.begin_us = std::min(step.begin_us, time->first);
      step.end_us = std::max(step.end_us, time->second);
      step.ranks[rank] = spans->second;
    }
    // Clocks of different machines cannot be compared.
    if (step.ranks.size() == traces.size() && step.end_us - step.begin_us < 60e6) steps.push_back(std::move(step));
  }
  if (steps.empty()) return std::nullopt;
  const auto middle = steps.begin() + static_cast<ptrdiff_t>(steps.size() / 2);
  std::nth_element(steps.begin(), middle, steps.end(), [](const StepPicture& one, const StepPicture& other) {
    return one.end_us - one.begin_us < other.end_us - other.begin_us;
  });
  return std::move(*middle);
}

std::string draw_step(const StepPicture& step, double width, const char* layout) {
  double bottom = 0;
  size_t count = 0;
  for (const auto& [rank, spans] : step.ranks)
    if (count++ < kMostStepRanks) bottom += height_of(spans);
  Svg svg({layout, width, bottom + kFoot}, "One step, rank by rank");
  const double taken = std::max(step.end_us - step.begin_us, 1e-3);
  const Scale x(step.begin_us, step.begin_us + taken * 1.02, 2, width - 2);
  const Scale in_ms(0, taken * 1.02 / 1000, x.low_px(), x.high_px());
  const std::vector<Tick> marks = ticks(0, in_ms.high(), static_cast<int>(width / 70));
  for (const Tick& tick : marks) svg.line("grid", in_ms(tick.value), 4, in_ms(tick.value), bottom);
  double y = 0;
  count = 0;
  for (const auto& [rank, spans] : step.ranks) {
    if (count++ >= kMostStepRanks) break;
    draw_rank(svg, rank, spans, x, y);
    y += height_of(spans);
  }
  draw_bottom_axis(svg, in_ms, marks, bottom, "milliseconds since the first gradient of the first rank");
  return svg.finish();
}

}  // namespace lockstep
