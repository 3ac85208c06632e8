#include "report/charts.h"

#include <algorithm>
#include <array>
#include <cctype>

namespace lockstep {
namespace {

constexpr int kColours = 6;
constexpr size_t kMostRankLines = 6;

/// Part of a name -> the label of the line, and its colour.
struct Role {
  const char* word;
  const char* name;
  int colour;
};
constexpr std::array<Role, 8> kRoles{Role{"train", "train", 1}, {"training", "train", 1},   {"valid", "valid", 2},
                                     {"val", "valid", 2},       {"validation", "valid", 2}, {"eval", "eval", 2},
                                     {"test", "test", 3},       {"testing", "test", 3}};

std::string lower(std::string text) {
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text;
}

/// "train/loss": the quantity "loss" and the role train. A name without a role is a quantity.
struct ParsedName {
  std::string quantity;
  const Role* role = nullptr;
};

ParsedName parse_name(const std::string& name) {
  ParsedName parsed;
  std::string rest;
  size_t start = 0;
  while (start <= name.size()) {
    const size_t end = std::min(name.find('/', start), name.size());
    const std::string part = name.substr(start, end - start);
    const auto* const role =
        std::find_if(kRoles.begin(), kRoles.end(), [&](const Role& one) { return lower(part) == one.word; });
    if (role != kRoles.end() && parsed.role == nullptr)
      parsed.role = role;
    else if (!part.empty())
      rest += (rest.empty() ? "" : " / ") + part;
    start = end + 1;
  }
  parsed.quantity = rest.empty() ? name : rest;
  return parsed;
}

std::string title_of(std::string quantity) {
  std::replace(quantity.begin(), quantity.end(), '_', ' ');
  if (!quantity.empty()) quantity[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(quantity[0])));
  return quantity;
}

bool holds(const std::string& text, const char* word) { return lower(text).find(word) != std::string::npos; }
bool is_rate(const std::string& quantity) {
  return holds(quantity, "learning rate") || lower(quantity) == "lr" || holds(quantity, "learning_rate");
}

int place_of(const std::string& quantity) {
  if (holds(quantity, "loss")) return 0;
  if (holds(quantity, "accuracy") || holds(quantity, "acc")) return 1;
  return is_rate(quantity) ? 3 : 2;
}

void add(ScalarChart& chart, const ParsedName& name, const Curve& curve) {
  const std::vector<Curve::Point>& points = curve.points();
  const std::string line = name.role != nullptr ? name.role->name : chart.chart.title;
  const int colour = name.role != nullptr ? name.role->colour : static_cast<int>(chart.entries.size()) % kColours + 1;
  ScalarChart::Entry entry{.name = line,
                           .colour = colour,
                           .last = points.empty() ? 0 : points.back().last,
                           .best = points.empty() ? 0 : points.front().mean,
                           .not_finite = curve.not_finite(),
                           .first_not_finite = curve.first_not_finite()};
  for (const Curve::Point& point : points)
    entry.best = chart.higher_is_better ? std::max(entry.best, point.greatest) : std::min(entry.best, point.least);
  chart.entries.push_back(entry);
  chart.chart.lines.push_back({line, colour, points});
}

bool is_share(const LineChart& chart) {
  for (const ChartLine& line : chart.lines)
    for (const Curve::Point& point : line.points)
      if (point.least < 0 || point.greatest > 1) return false;
  return holds(chart.title, "accuracy") || holds(chart.title, "share");
}

}  // namespace

std::vector<ScalarChart> scalar_charts(const RunData& run) {
  std::vector<ScalarChart> charts;
  for (const auto& [name, curve] : run.scalars) {
    const ParsedName parsed = parse_name(name);
    auto chart = std::find_if(charts.begin(), charts.end(),
                              [&](const ScalarChart& one) { return one.chart.title == title_of(parsed.quantity); });
    if (chart == charts.end()) {
      chart = charts.insert(charts.end(), ScalarChart{});
      chart->chart.title = title_of(parsed.quantity);
      chart->chart.epochs = run.epochs;
      chart->higher_is_better = place_of(parsed.quantity) == 1;
    }
    add(*chart, parsed, curve);
  }
  std::stable_sort(charts.begin(), charts.end(), [](const ScalarChart& one, const ScalarChart& other) {
    return place_of(one.chart.title) < place_of(other.chart.title);
  });
  for (ScalarChart& chart : charts) {
    chart.chart.share = is_share(chart.chart);
    chart.chart.from_zero = is_rate(chart.chart.title);
    chart.chart.falls = holds(chart.chart.title, "loss") || holds(chart.chart.title, "perplexity");
    // Train before valid before test, regardless of the alphabet.
    const auto by_colour = [](const auto& one, const auto& other) { return one.colour < other.colour; };
    std::stable_sort(chart.entries.begin(), chart.entries.end(), by_colour);
    std::stable_sort(chart.chart.lines.begin(), chart.chart.lines.end(), by_colour);
  }
  return charts;
}

namespace {

double samples_per_step(const RunData& run) {
  double sum = 0;
  for (const RankData& rank : run.ranks)
    if (rank.steps > 0) sum += static_cast<double>(rank.samples) / static_cast<double>(rank.steps);
  return sum;
}

}  // namespace

Curve throughput(const RunData& run) {
  Curve curve;
  if (run.ranks.empty()) return curve;
  const double samples = samples_per_step(run);
  for (const Curve::Point& point : run.ranks.front().steps_per_second.points())
    curve.add(point.x, point.mean * samples);
  return curve;
}

double mean_throughput(const RunData& run) {
  if (run.ranks.empty() || run.ranks.front().seconds <= 0) return 0;
  return static_cast<double>(run.ranks.front().steps) / run.ranks.front().seconds * samples_per_step(run);
}

double mean_communication_share(const RunData& run) {
  double communication = 0, seconds = 0;
  for (const RankData& rank : run.ranks) communication += rank.communication_s, seconds += rank.seconds;
  return seconds > 0 ? communication / seconds : 0;
}

bool knows_communication(const RunData& run) {
  return std::any_of(run.ranks.begin(), run.ranks.end(), [](const RankData& rank) {
    return rank.communication_s > 0 && rank.seconds > 0 && !rank.communication_share.empty();
  });
}

LineChart communication_chart(const RunData& run) {
  LineChart chart;
  chart.title = "Communication";
  chart.epochs = run.epochs;
  chart.share = chart.from_zero = true;
  std::vector<const RankData*> ranks;
  for (const RankData& rank : run.ranks)
    if (!rank.communication_share.empty() && rank.seconds > 0) ranks.push_back(&rank);
  if (ranks.size() > kMostRankLines) {
    std::sort(ranks.begin(), ranks.end(), [](const RankData* one, const RankData* other) {
      return one->communication_s / one->seconds < other->communication_s / other->seconds;
    });
    ranks = {ranks.front(), ranks.back()};
  }
  for (const RankData* rank : ranks)
    chart.lines.push_back({"rank " + std::to_string(rank->rank), static_cast<int>(chart.lines.size()) % kColours + 1,
                           rank->communication_share.points()});
  return chart;
}

}  // namespace lockstep
