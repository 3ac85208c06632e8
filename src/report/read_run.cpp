#include <lockstep/error.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>

#include "observe/events/event_reader.h"
#include "report/run_data.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostTags = 500;
constexpr std::string_view kStart = "metrics_rank", kEnd = ".jsonl";

/// Names of the regular files in a folder; empty if it is not a folder.
std::vector<std::string> files_of(const fs::path& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    if (it->is_regular_file(ignored)) names.push_back(it->path().filename().string());
  }
  std::sort(names.begin(), names.end());
  return names;
}

/// Ranks whose metrics files exist, ascending.
std::vector<int> ranks_in(const fs::path& folder) {
  std::vector<int> ranks;
  for (const std::string& name : files_of(folder)) {
    if (!name.starts_with(kStart) || !name.ends_with(kEnd) || name.size() <= kStart.size() + kEnd.size()) continue;
    const char* const end = name.data() + name.size() - kEnd.size();
    int rank = 0;
    const auto [rest, error] = std::from_chars(name.data() + kStart.size(), end, rank);
    if (error == std::errc() && rest == end && rank >= 0) ranks.push_back(rank);
  }
  std::sort(ranks.begin(), ranks.end());
  return ranks;
}

/// If a start has fewer ranks than an earlier one in the same folder, files of the other ranks remain there.
void leave_out_former_ranks(RunData& run) {
  if (run.start.world_size < 1) return;
  const auto left_out =
      std::erase_if(run.ranks, [&](const RankData& rank) { return rank.rank >= run.start.world_size; });
  if (left_out > 0)
    run.notes.push_back(std::to_string(left_out) + (left_out == 1 ? " file is" : " files are") +
                        " left out: from an earlier start with more ranks");
}

void note_ranks(RunData& run) {
  const auto say = [&](const std::string& what) { run.notes.push_back(what); };
  for (const RankData& rank : run.ranks) {
    const std::string of_rank = "of rank " + std::to_string(rank.rank);
    if (rank.lost_lines > 0)
      say(std::to_string(rank.lost_lines) + " lines " + of_rank + " are missing: they could not be written");
    if (rank.unreadable_lines > 0)
      say(std::to_string(rank.unreadable_lines) + " lines " + of_rank + " could not be read");
  }
  const auto there = static_cast<int>(run.ranks.size());
  if (run.start.world_size > there)
    say("the files of " + std::to_string(run.start.world_size - there) + " of " + std::to_string(run.start.world_size) +
        " ranks are not in this folder; rates cover only the ranks that are");
}

}  // namespace

void read_events(std::istream& in, const std::string& name, RunData& run) {
  EventReader reader(in);
  while (const auto event = reader.next()) {
    if (event->starts_session && run.ranks.empty())
      for (auto& [tag, curve] : run.scalars) curve.forget_after(static_cast<double>(event->step) - 1);
    for (const SummaryValue& value : event->values) {
      if (value.kind == SummaryKind::kHistogram) ++run.summaries["histograms"];
      if (value.kind == SummaryKind::kImage) ++run.summaries["pictures"];
      if (value.kind == SummaryKind::kText) ++run.summaries["texts"];
      if (value.kind != SummaryKind::kScalar || !run.ranks.empty()) continue;
      const std::string tag = value.tag.substr(0, 200);
      if (run.scalars.size() < kMostTags || run.scalars.contains(tag))
        run.scalars[tag].add(static_cast<double>(event->step), value.number);
    }
  }
  if (!reader.trouble().empty())
    run.notes.push_back("the event file " + name + " could be read only in part: " + reader.trouble());
}

RunData read_run(const std::string& folder) {
  RunData run;
  std::error_code error;
  if (!fs::is_directory(folder, error)) throw Error("there is no folder " + folder);
  for (const int rank : ranks_in(folder)) {
    std::ifstream file(fs::path(folder) / (std::string(kStart) + std::to_string(rank) + std::string(kEnd)));
    if (!file)
      run.notes.push_back("the lines of rank " + std::to_string(rank) + " could not be opened");
    else
      read_metrics(file, rank, run);
  }
  leave_out_former_ranks(run);
  run.teams = starts_in(folder);
  bool has_events = false;
  for (const fs::path& place : {fs::path(folder), fs::path(folder) / "tensorboard"}) {
    for (const std::string& name : files_of(place)) {
      if (name.find(".tfevents.") == std::string::npos) continue;
      std::ifstream file(place / name, std::ios::binary);
      has_events = true;
      read_events(file, name, run);
    }
  }
  if (run.ranks.empty() && !has_events)
    throw Error(folder +
                " contains neither a run log (metrics_rank0.jsonl) nor event files; write one with "
                "lockstep::RunLog, or name the folder of another run");
  note_ranks(run);
  return run;
}

}  // namespace lockstep
