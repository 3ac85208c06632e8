#include "faultbox/compare.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <regex>
#include <thread>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

constexpr int kRanks = 3;

struct Fault {
  const char* name;
  const char* what;
  int code;  ///< that `lockstep run` must end with
};

const std::vector<Fault>& faults() {
  static const std::vector<Fault> list = {
      {"kill", "SIGKILL of a rank", 41},           {"segv", "SIGSEGV of a rank", 41},
      {"exception", "an exception of a rank", 40}, {"exit0", "a rank ends early with code 0", 44},
      {"stop", "SIGSTOP of a rank", 43},           {"launcher", "SIGKILL of the launcher", -SIGKILL}};
  return list;
}

struct Tally {
  int runs = 0, named = 0, hanging = 0, with_processes_left = 0;
  std::vector<double> known_ms, end_ms;
  std::map<int, int> codes;
};

/// The rank that torchrun's table calls the root cause.
std::optional<int> torchrun_culprit(const std::string& text) {
  const size_t at = text.find("Root Cause");
  std::smatch match;
  const std::string rest = at == std::string::npos ? "" : text.substr(at);
  if (!std::regex_search(rest, match, std::regex("rank +: +(\\d+)"))) return std::nullopt;
  return std::stoi(match[1]);
}

/// When torchrun first says that something has failed, on a line of its log.
std::optional<int64_t> torchrun_known_ns(const std::vector<Line>& lines) {
  for (const Line& line : lines)
    for (const char* words : {" failed (exitcode: ", " closing signal "})
      if (line.text.find(words) != std::string::npos) return line.at_ns;
  return std::nullopt;
}

void attempt(Tally& tally, const Fault& fault, const std::string& python, Draw& draw, int patience_s) {
  const bool under_torchrun = !python.empty(), of_launcher = fault.code < 0;
  const auto rank = static_cast<int>(draw.number(0, kRanks - 1));
  const std::string step = std::to_string(draw.number(1, kSteps - 1));
  RunPlan plan{.ranks = kRanks, .options = {"--hang-timeout", "5"}, .folder = std::make_shared<TemporaryFolder>()};
  plan.words = {"steps=" + std::to_string(kSteps),
                "pause_ms=20",
                "rank=" + std::to_string(rank),
                "at=forward",
                "step=" + step,
                "fault=" + (of_launcher ? std::string("none") : fault.name)};
  if (under_torchrun) {
    plan.launcher = {python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", std::to_string(kRanks)};
    plan.program = {LOCKSTEP_SOURCE_DIR "/tests/faultbox/ddp_rank.py",
                    "page=" + (plan.folder->path() / "page").string()};
    plan.program.insert(plan.program.end(), plan.words.begin(), plan.words.end());
  }
  Run run(std::move(plan));
  auto& mine = run.page().ranks[rank];
  if (of_launcher) {
    run.wait_until([&] { return mine.place.load() >= Place::kForward && mine.step.load() >= std::stoi(step); },
                   kLongest);
    mine.fault_ns = now_ns();
    ::kill(run.pid(), SIGKILL);
  } else {
    run.wait_until([&] { return mine.fault_ns.load() != 0; }, kLongest);
  }
  const bool ended = run.wait(std::chrono::seconds(patience_s));
  ++tally.runs;
  const Report report = run.report();
  const auto culprit = under_torchrun ? torchrun_culprit(report.text) : report.culprit;
  const int64_t fault_ns = mine.fault_ns.load();
  const auto known_ns = under_torchrun ? torchrun_known_ns(run.lines()) : report.known_ns;
  if (ended && known_ns) tally.known_ms.push_back(static_cast<double>(*known_ns - fault_ns) / 1e6);
  if (!ended) {
    ++tally.hanging;
  } else {
    ++tally.codes[run.exit_code()];
    tally.named += culprit == rank ? 1 : 0;
    // For faults of the launcher itself: until its ranks are gone, up to the limit here.
    const bool gone = eventually([&] { return run.processes().empty(); }, std::chrono::seconds(1));
    tally.with_processes_left += gone ? 0 : 1;
    const int64_t end_ns = of_launcher ? now_ns() : run.ended_ns();
    if (gone) tally.end_ms.push_back(static_cast<double>(end_ns - fault_ns) / 1e6);
  }
  for (const pid_t left : run.processes()) ::kill(left, SIGKILL);
  eventually([&] { return run.processes().empty(); }, std::chrono::seconds(2));
  reap_orphans({});
}

/// "median / longest s".
std::string seconds_cell(std::vector<double> times_ms) {
  if (times_ms.empty()) return "-";
  std::sort(times_ms.begin(), times_ms.end());
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.2f / %.2f", times_ms[times_ms.size() / 2] / 1e3, times_ms.back() / 1e3);
  return text.data();
}

std::string row(const Tally& tally, bool of_launcher) {
  std::string codes;
  for (const auto& [code, times] : tally.codes)
    codes += (codes.empty() ? "" : ", ") + std::to_string(code) + " (" + std::to_string(times) + ")";
  return (of_launcher ? "-" : std::to_string(tally.named) + " of " + std::to_string(tally.runs)) + " | " +
         (codes.empty() ? "-" : codes) + " | " + seconds_cell(tally.known_ms) + " | " + seconds_cell(tally.end_ms) +
         " | " + std::to_string(tally.hanging) + " | " + std::to_string(tally.with_processes_left) + " |";
}

}  // namespace

std::vector<std::string> compared_faults() {
  std::vector<std::string> names;
  for (const Fault& fault : faults()) names.emplace_back(fault.name);
  return names;
}

int compare(const std::string& python, const std::vector<std::string>& names, uint64_t seed, int count,
            int patience_s) {
  std::printf(
      "| fault | launcher | right rank named | exit codes (times) | known after, median / max s | ended after, median "
      "/ "
      "max s | not over after %d s | processes left 1 s later |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
      patience_s);
  int wrong = 0;
  for (const Fault& fault : faults()) {
    if (!names.empty() && std::find(names.begin(), names.end(), fault.name) == names.end()) continue;
    for (const std::string& launcher : {std::string(), python}) {
      Tally tally;
      for (int instance = 0; instance < count; ++instance) {
        Draw draw(seed, fault.name, instance);
        attempt(tally, fault, launcher, draw, patience_s);
      }
      std::printf("| %s | %s | %s\n", fault.what, launcher.empty() ? "lockstep run" : "torchrun",
                  row(tally, fault.code < 0).c_str());
      std::fflush(stdout);
      if (!launcher.empty()) continue;
      const bool right = tally.codes[fault.code] == count && (fault.code < 0 || tally.named == count) &&
                         tally.with_processes_left == 0;
      wrong += right ? 0 : 1;
    }
  }
  return wrong == 0 ? 0 : 1;
}

}  // namespace lockstep::faultbox
