#include "report/report.h"

#include <lockstep/error.h>

#include <algorithm>
#include <filesystem>
#include <fstream>

#include "base/atomic_file.h"
#include "report/page.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostTraces = 8, kMostFiles = 40;

std::string name_of(const fs::path& folder) {
  std::error_code error;
  const fs::path whole = fs::weakly_canonical(folder, error);
  const std::string name = (error ? folder : whole).filename().string();
  return name.empty() ? "run" : name;
}

/// The description of a file of a run; empty if it is not worth listing.
std::string description_of(const std::string& name) {
  if (name.starts_with("trace_rank") && name.ends_with(".json")) return "trace: open it in ui.perfetto.dev";
  if (name.starts_with("metrics_rank") && name.ends_with(".jsonl")) return "metrics, JSON lines";
  if (name == "starts.jsonl") return "starts by the launcher, JSON lines";
  if (name.starts_with("rank_") && name.ends_with(".log")) return "output of the rank";
  if (name.find(".tfevents.") != std::string::npos) return "TensorBoard event file";
  if (name.ends_with(".safetensors") || name.ends_with(".pt")) return "checkpoint";
  return "";
}

void add_files(PageContent& content, const fs::path& folder, const fs::path& page_folder) {
  std::error_code error;
  for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
    std::error_code ignored;
    const std::string what = description_of(it->path().filename().string());
    if (what.empty() || !it->is_regular_file(ignored)) continue;
    const fs::path relative = fs::relative(it->path(), page_folder, ignored);
    if (content.files.size() < kMostFiles && !relative.empty()) content.files.push_back({relative.string(), what});
  }
}

void add_traces(PageContent& content, const fs::path& folder) {
  for (const RankData& rank : content.run.ranks) {
    if (content.traces.size() >= kMostTraces) break;
    const std::string name = "trace_rank" + std::to_string(rank.rank) + ".json";
    std::ifstream file(folder / name);
    if (!file) continue;
    try {
      content.traces[rank.rank] = read_trace(file);
    } catch (const Error& error) {
      content.run.notes.push_back("the trace " + name + " could not be read: " + error.what());
    }
  }
}

}  // namespace

std::string write_report(const std::string& folder, const std::string& output) {
  const fs::path page = output.empty() ? fs::path(folder) / "report.html" : fs::path(output);
  PageContent content{.name = name_of(folder), .folder = folder, .run = read_run(folder), .traces = {}, .files = {}};
  add_traces(content, folder);
  const fs::path page_folder = page.parent_path().empty() ? fs::path(".") : page.parent_path();
  add_files(content, folder, page_folder);
  add_files(content, fs::path(folder) / "tensorboard", page_folder);
  std::sort(content.files.begin(), content.files.end(),
            [](const LinkedFile& one, const LinkedFile& other) { return one.path < other.path; });
  const std::string text = draw_page(content);
  AtomicFile file(page.string());
  file.write(text.data(), text.size());
  file.commit();
  return page.string();
}

}  // namespace lockstep
