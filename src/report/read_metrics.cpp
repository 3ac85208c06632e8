#include <algorithm>
#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "report/bounded_lines.h"
#include "report/run_data.h"

// A program wrote the lines, but the files are untrusted: every member may be missing, of another type or out of range.

namespace lockstep {
namespace {

using nlohmann::json;

constexpr size_t kMostNames = 500, kMostBuckets = 4096, kMostRanks = 4096, kMostNameBytes = 200, kMostSamples = 400;

constexpr double kLeastSeconds = 0.25;

double number(const json& line, const char* name) {
  const auto member = line.find(name);
  if (member == line.end()) return 0;
  if (member->is_number()) return member->get<double>();
  if (member->is_string()) {
    const std::string& text = member->get_ref<const std::string&>();
    if (text == "Infinity" || text == "-Infinity")
      return std::copysign(std::numeric_limits<double>::infinity(), text[0] == '-' ? -1 : 1);
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
  }
  return 0;
}

/// A finite number of at least 0.
double amount(const json& line, const char* name) {
  const double value = number(line, name);
  return std::isfinite(value) && value > 0 ? value : 0;
}

int64_t whole(const json& line, const char* name) { return static_cast<int64_t>(std::min(amount(line, name), 1e15)); }

std::string shortened(std::string text) {
  if (text.size() <= kMostNameBytes) return text;
  size_t end = kMostNameBytes;
  while (end > 0 && (static_cast<unsigned char>(text[end]) & 0xc0) == 0x80) --end;  // do not cut within a character
  return text.substr(0, end) + "\xe2\x80\xa6";
}

std::string text(const json& line, const char* name) {
  const auto member = line.find(name);
  return member != line.end() && member->is_string() ? shortened(member->get<std::string>()) : "";
}

/// Elements of a list, or none.
const json& list(const json& line, const char* name) {
  static const json none = json::array();
  const auto member = line.find(name);
  return member != line.end() && member->is_array() ? *member : none;
}

class MetricsReader {
 public:
  MetricsReader(int rank, RunData& run, bool tells_for_all) : run_(run), tells_for_all_(tells_for_all) {
    run.ranks.emplace_back();
    run.ranks.back().rank = rank;
  }

  void read(const std::string& text) {
    const json line = json::parse(text, nullptr, /*allow_exceptions=*/false);
    const std::string type = line.is_object() ? lockstep::text(line, "type") : "";
    if (type == "run") {
      begin(line);
    } else if (type == "scalar") {
      scalar(line);
    } else if (type == "steps") {
      steps(line);
    } else if (type == "reductions") {
      if (tells_for_all_) reductions(line);
    } else if (type == "end") {
      rank().ended_by = lockstep::text(line, "by");
    } else if (type == "lost") {
      rank().lost_lines = whole(line, "lines");
      return;
    } else {
      ++rank().unreadable_lines;
      return;
    }
    note_place(line);
  }

  void note_unreadable() { ++rank().unreadable_lines; }

 private:
  RankData& rank() { return run_.ranks.back(); }

  void note_place(const json& line) {
    rank().last_wall_s = number(line, "wall_s");
    rank().last_step = whole(line, "step");
    if (tells_for_all_ && run_.epochs.size() < kMostNames && whole(line, "step") > first_step_)
      run_.epochs.try_emplace(whole(line, "epoch"), whole(line, "step"));
  }

  void begin(const json& line) {
    const int64_t first_step = first_step_ = whole(line, "step");
    RankData& mine = rank();
    mine.ended_by.clear();
    mine.steps_per_second.forget_after(static_cast<double>(first_step));
    mine.communication_share.forget_after(static_cast<double>(first_step));
    if (first_step == 0 || mine.begin_wall_s == 0) mine.begin_wall_s = number(line, "wall_s");
    if (first_step == 0) mine.steps = mine.samples = 0, mine.seconds = mine.communication_s = 0;
    if (!tells_for_all_) return;
    for (auto& [name, curve] : run_.scalars) curve.forget_after(static_cast<double>(first_step));
    std::erase_if(run_.scalars, [](const auto& named) { return named.second.empty(); });
    std::erase_if(run_.epochs, [&](const auto& epoch) { return epoch.second > first_step; });
    if (first_step == 0) run_.starts = 0;
    ++run_.starts;
    run_.reductions = {};
    run_.start = start_of(line);
  }

  static StartData start_of(const json& line) {
    StartData start;
    start.world_size = static_cast<int>(std::min<int64_t>(whole(line, "world_size"), kMostRanks));
    start.threads = static_cast<int>(std::min<int64_t>(whole(line, "threads"), 1 << 20));
    start.usable_cores = static_cast<int>(std::min<int64_t>(whole(line, "usable_cores"), 1 << 20));
    start.memory_bytes = whole(line, "memory_bytes");
    start.backend = lockstep::text(line, "backend");
    start.host = lockstep::text(line, "host");
    start.system = lockstep::text(line, "system");
    start.kernel = lockstep::text(line, "kernel");
    start.cpu = lockstep::text(line, "cpu");
    start.folder = lockstep::text(line, "folder");
    for (const json& word : list(line, "command"))
      if (word.is_string() && start.command.size() < kMostNames) start.command.push_back(shortened(word));
    const auto versions = line.find("versions");
    if (versions == line.end() || !versions->is_object()) return start;
    for (const auto& [name, version] : versions->items())
      if (version.is_string() && start.versions.size() < 20)
        start.versions.emplace_back(shortened(name), shortened(version));
    return start;
  }

  void scalar(const json& line) {
    if (!tells_for_all_) return;
    const std::string name = lockstep::text(line, "name");
    if (run_.scalars.size() >= kMostNames && !run_.scalars.contains(name)) return;
    run_.scalars[name].add(static_cast<double>(whole(line, "step")), number(line, "value"));
  }

  void steps(const json& line) {
    const int64_t count = whole(line, "steps");
    const double seconds = amount(line, "seconds"), communication = amount(line, "communication_s");
    rank().steps += count;
    rank().samples += whole(line, "samples");
    rank().seconds += seconds;
    rank().communication_s += communication;
    // The rest at the end of an epoch may be a step or two, which say nothing about rates.
    if (seconds <= 0 || (seconds < kLeastSeconds && !rank().steps_per_second.empty())) return;
    const auto step = static_cast<double>(whole(line, "step"));
    rank().steps_per_second.add(step, static_cast<double>(count) / seconds);
    rank().communication_share.add(step, std::min(communication / seconds, 1.0));
  }

  void reductions(const json& line) {
    ReductionData& data = run_.reductions;
    data.reductions = whole(line, "reductions");
    data.backward_ms = amount(line, "backward_ms");
    data.wait_ms = amount(line, "wait_ms");
    data.overlap = std::min(amount(line, "overlap"), 1.0);
    data.wait_ms_by_rank.clear();
    data.times_last_by_rank.clear();
    for (const json& one : list(line, "wait_ms_by_rank"))
      if (data.wait_ms_by_rank.size() < kMostRanks) data.wait_ms_by_rank.push_back(amount({{"x", one}}, "x"));
    for (const json& one : list(line, "times_last_by_rank"))
      if (data.times_last_by_rank.size() < kMostRanks) data.times_last_by_rank.push_back(whole({{"x", one}}, "x"));
    const json& buckets = list(line, "buckets");
    const size_t count = std::min(buckets.size(), kMostBuckets);
    if (data.buckets.size() != count) data.buckets.assign(count, {});  // refresh() may change them
    for (size_t b = 0; b < count; ++b)
      if (buckets[b].is_object()) add(data.buckets[b], buckets[b]);
  }

  static void add(BucketTimes& bucket, const json& line) {
    bucket.first_parameter = lockstep::text(line, "first_parameter");
    bucket.last_parameter = lockstep::text(line, "last_parameter");
    bucket.parameters = whole(line, "parameters");
    bucket.bytes = whole(line, "bytes");
    const std::pair<std::vector<float>*, const char*> times[] = {{&bucket.ready_ms, "ready_ms"},
                                                                 {&bucket.start_ms, "start_ms"},
                                                                 {&bucket.end_ms, "end_ms"},
                                                                 {&bucket.wait_ms, "wait_ms"}};
    for (const auto& [values, name] : times) {
      values->push_back(static_cast<float>(std::min(amount(line, name), 1e9)));
      if (values->size() <= kMostSamples) continue;
      // Keep every second one: they still cover the whole run.
      for (size_t i = 0; i < values->size() / 2; ++i) (*values)[i] = (*values)[2 * i];
      values->resize(values->size() / 2);
    }
  }

  RunData& run_;
  const bool tells_for_all_;  ///< true for the first rank that is read
  int64_t first_step_ = 0;
};

}  // namespace

void read_metrics(std::istream& in, int rank, RunData& run) {
  MetricsReader reader(rank, run, run.ranks.empty());
  BoundedLines lines(in);
  for (std::string line; lines.next(line);) {
    if (lines.is_too_long())
      reader.note_unreadable();
    else if (!line.empty())
      reader.read(line);
  }
}

}  // namespace lockstep
