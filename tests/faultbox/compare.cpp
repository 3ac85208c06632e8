#include "faultbox/compare.h"

#include <signal.h>

#include <algorithm>
#include <cstdio>
#include <regex>
#include <thread>

#include "faultbox/cases.h"

namespace lockstep::faultbox {
namespace {

constexpr int kSteps = 12, kRanks = 3;

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
  std::vector<double> end_ms;
  std::map<int, int> codes;
};

/// Whom torchrun's table calls the root cause.
std::optional<int> torchrun_culprit(const std::string& text) {
  const size_t at = text.find("Root Cause");
  std::smatch match;
  const std::string rest = at == std::string::npos ? "" : text.substr(at);
  if (!std::regex_search(rest, match, std::regex("rank +: +(\\d+)"))) return std::nullopt;
  return std::stoi(match[1]);
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
  if (!ended) {
    ++tally.hanging;
  } else {
    ++tally.codes[run.exit_code()];
    tally.named += culprit == rank ? 1 : 0;
    // Of the launcher itself: until its ranks are gone, at most as long as one waits here.
    const bool gone = eventually([&] { return run.processes().empty(); }, std::chrono::seconds(1));
    tally.with_processes_left += gone ? 0 : 1;
    const int64_t end_ns = of_launcher ? now_ns() : run.ended_ns();
    if (gone) tally.end_ms.push_back(static_cast<double>(end_ns - mine.fault_ns.load()) / 1e6);
  }
  for (const pid_t left : run.processes()) ::kill(left, SIGKILL);
  eventually([&] { return run.processes().empty(); }, std::chrono::seconds(2));
  reap_orphans({});
}

std::string row(const Tally& tally, bool of_launcher) {
  std::string codes;
  for (const auto& [code, times] : tally.codes)
    codes += (codes.empty() ? "" : ", ") + std::to_string(code) + " (" + std::to_string(times) + ")";
  auto times = tally.end_ms;
  std::sort(times.begin(), times.end());
  std::array<char, 64> took{};
  if (!times.empty())
    std::snprintf(took.data(), took.size(), "%.2f / %.2f s", times[times.size() / 2] / 1e3, times.back() / 1e3);
  return (of_launcher ? "-" : std::to_string(tally.named) + " of " + std::to_string(tally.runs)) + " | " +
         (codes.empty() ? "-" : codes) + " | " + (times.empty() ? "-" : took.data()) + " | " +
         std::to_string(tally.hanging) + " | " + std::to_string(tally.with_processes_left) + " |";
}

}  // namespace

int compare(const std::string& python, uint64_t seed, int count, int patience_s) {
  std::printf(
      "| fault | launcher | culprit named | exit codes (times) | fault to end, median / max | not over after %d s | "
      "processes left 1 s later |\n| --- | --- | --- | --- | --- | --- | --- |\n",
      patience_s);
  int wrong = 0;
  for (const Fault& fault : faults()) {
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
