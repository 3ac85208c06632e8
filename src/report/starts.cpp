#include "report/starts.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "report/axis.h"
#include "report/bar_charts.h"
#include "report/bounded_lines.h"
#include "report/svg.h"
#include "report/text.h"

namespace lockstep {
namespace {

constexpr double kMostSeconds = 2e11, kMostSteps = 1e15, kMostOfRanks = 4096;
constexpr double kPictureHead = 10, kPictureHeight = 120, kPictureFoot = 40, kPictureLeft = 26;

/// A finite number between `least` and `most`; `least` if there is none.
double bounded(const nlohmann::json& line, const char* name, double least, double most) {
  const auto member = line.find(name);
  if (member == line.end() || !member->is_number()) return least;
  const double value = member->get<double>();
  return std::isfinite(value) ? std::clamp(value, least, most) : least;
}

std::optional<TeamData> read_team(const std::string& text) {
  const nlohmann::json line = nlohmann::json::parse(text, nullptr, /*allow_exceptions=*/false);
  if (!line.is_object()) return std::nullopt;
  TeamData team;
  team.ranks = static_cast<int>(bounded(line, "ranks", 1, kMostOfRanks));
  team.began_s = bounded(line, "began_s", 0, kMostSeconds);
  team.ended_s = std::max(team.began_s, bounded(line, "ended_s", 0, kMostSeconds));
  team.first_step = static_cast<int64_t>(bounded(line, "first_step", 0, kMostSteps));
  team.steps = static_cast<int64_t>(bounded(line, "steps", 0, kMostSteps));
  team.exit_code = static_cast<int>(bounded(line, "exit_code", 0, 255));
  team.culprit = static_cast<int>(bounded(line, "culprit", -1, kMostOfRanks));
  const auto resized = line.find("resized");
  team.resized = resized != line.end() && resized->is_boolean() && resized->get<bool>();
  return team;
}

/// The unit of a time axis that ends after this many seconds.
struct TimeUnit {
  double seconds;
  const char* name;
};
TimeUnit unit_for(double seconds) {
  if (seconds > 3 * 86400) return {86400, "days"};
  if (seconds > 3 * 3600) return {3600, "hours"};
  if (seconds > 180) return {60, "minutes"};
  return {1, "seconds"};
}

std::string told(const TeamData& team, size_t number) {
  return "start " + std::to_string(number + 1) + ", " + counted(team.ranks, "rank") + ": " +
         counted(team.steps, "step") + " from " + std::to_string(team.first_step) + " in " +
         time_taken(team.ended_s - team.began_s) + "; " + how_it_ended(team) +
         (team.lost > 0 ? ", " + counted(team.lost, "step") + " lost" : "");
}

}  // namespace

int64_t read_starts(std::istream& in, std::vector<TeamData>& teams) {
  int64_t left_out = 0;
  BoundedLines lines(in);
  for (std::string line; lines.next(line);) {
    if (line.empty() && !lines.is_too_long()) continue;
    const auto team = read_team(line);
    if (!team || teams.size() >= kMostTeams) ++left_out;
    if (!team) continue;
    if (teams.size() >= kMostTeams) teams.pop_back();
    teams.push_back(*team);
  }
  count_lost(teams);
  return left_out;
}

std::vector<TeamData> starts_in(const std::string& folder) {
  std::vector<TeamData> teams;
  std::ifstream file(folder + "/starts.jsonl");
  if (file) read_starts(file, teams);
  return teams;
}

void count_lost(std::vector<TeamData>& teams) {
  for (size_t i = 0; i < teams.size(); ++i) {
    const int64_t next = i + 1 < teams.size() ? teams[i + 1].first_step : teams[i].end_step();
    teams[i].lost = std::clamp<int64_t>(teams[i].end_step() - next, 0, teams[i].steps);
  }
}

EffectiveProgress effective_progress(const std::vector<TeamData>& teams) {
  EffectiveProgress progress;
  for (const TeamData& team : teams) {
    progress.made += team.steps;
    progress.kept += team.steps - team.lost;
  }
  return progress;
}

std::string how_it_ended(const TeamData& team) {
  if (team.resized) return "left for another number of ranks";
  if (team.culprit >= 0)
    return "rank " + std::to_string(team.culprit) + " failed (" + std::to_string(team.exit_code) + ")";
  return team.exit_code == 0 ? "done" : "ended with " + std::to_string(team.exit_code);
}

std::string draw_starts(const std::vector<TeamData>& teams, double width, const char* layout) {
  const double bottom = kPictureHead + kPictureHeight;
  Svg svg({layout, width, bottom + kPictureFoot}, "Starts of the run, and their ranks");
  if (teams.empty()) return svg.finish();
  int most = 1;
  double last = teams.front().began_s;
  for (const TeamData& team : teams) {
    most = std::max(most, team.ranks);
    last = std::max(last, team.ended_s);
  }
  const double first = teams.front().began_s, taken = std::max(last - first, 1e-3);
  const TimeUnit unit = unit_for(taken);
  const Scale x(0, taken / unit.seconds * 1.02, kPictureLeft, width - 2);
  const Scale y(0, most, bottom, kPictureHead);
  for (const Tick& tick : ticks(0, most, 4, /*whole=*/true)) {
    svg.line("grid", x.low_px(), y(tick.value), x.high_px(), y(tick.value));
    svg.text("tick", x.low_px() - 6, y(tick.value) + 4, "end", tick.label);
  }
  for (size_t i = 0; i < teams.size(); ++i) {
    const TeamData& team = teams[i];
    const std::string text = told(team, i);
    const double left = x((team.began_s - first) / unit.seconds), top = y(team.ranks);
    const double right = std::max(x((team.ended_s - first) / unit.seconds), left + 1);
    const double lost = team.steps > 0 ? static_cast<double>(team.lost) / static_cast<double>(team.steps) : 0;
    const double kept = right - (right - left) * lost;
    svg.rect("compute", left, top, kept - left, bottom - top, text);
    if (lost > 0) svg.rect("wait", kept, top, right - kept, bottom - top, text);
    if (team.culprit >= 0) svg.rect("late", right - 1, kPictureHead, 2, kPictureHeight, text);
    if (team.resized) svg.rect("ready", right - 1, kPictureHead, 2, kPictureHeight, text);
  }
  draw_bottom_axis(svg, x, ticks(0, x.high(), static_cast<int>(width / 70)), bottom,
                   std::string(unit.name) + " since the first start");
  return svg.finish();
}

}  // namespace lockstep
