#pragma once

#include <cstdint>
#include <istream>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// One start of a run by the launcher: a line of starts.jsonl (docs/launcher.md).
struct TeamData {
  int ranks = 1;
  double began_s = 0, ended_s = 0;  ///< wall clock
  int64_t first_step = 0;           ///< of the checkpoint that it resumed
  int64_t steps = 0;                ///< made by it
  int exit_code = 0, culprit = -1;  ///< -1: no rank failed
  bool resized = false;             ///< it left so that the run continues with another number of ranks
  int64_t lost = 0;                 ///< steps at its end that the next start makes again
  int64_t end_step() const { return first_step + steps; }
};

/// The combined steps of all starts.
struct EffectiveProgress {
  int64_t made = 0;
  int64_t kept = 0;  ///< made - lost
  double share() const { return made > 0 ? static_cast<double>(kept) / static_cast<double>(made) : 1; }
};

/// The most starts that are kept; later ones replace the last.
constexpr size_t kMostTeams = 2000;

/// Adds the lines of starts.jsonl, whatever they hold, and counts lost steps. Returns the number of lines that are not
/// shown.
int64_t read_starts(std::istream& in, std::vector<TeamData>& teams);
/// The file of a run's folder; empty if none.
std::vector<TeamData> starts_in(const std::string& folder);

/// Sets the steps that each start has lost to the next one.
void count_lost(std::vector<TeamData>& teams);
EffectiveProgress effective_progress(const std::vector<TeamData>& teams);

/// "rank 1 failed (41)", "left for another number of ranks", "ended".
std::string how_it_ended(const TeamData& team);

/// Ranks over time: a bar for each start, as high as its number of ranks, with the steps lost at its end.
std::string draw_starts(const std::vector<TeamData>& teams, double width, const char* layout);

}  // namespace lockstep
