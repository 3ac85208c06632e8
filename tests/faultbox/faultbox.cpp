// Injects faults into training runs at random, and checks how the launcher reports them:
//
//     build/bin/faultbox --seed 7 --case kill --count 100
//
// Every instance of a case is drawn from the seed, the case's name and its own number, so that
// `faultbox --seed 7 --case kill --only 17` repeats the 17th. Checked after each: exit code, report, culprit, times, no
// process, no socket, no named segment left, and the newest checkpoint loads. Ends with 1 if anything was wrong.

#include <signal.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/usable_cores.h"
#include "faultbox/cases.h"
#include "faultbox/compare.h"
#include "faultbox/schedule.h"

namespace lockstep::faultbox {
namespace {

struct Options {
  uint64_t seed = std::random_device()();
  std::vector<std::string> cases;
  int count = -1;
  int first = 0;
  int only = -1;
  int jobs = 0;
  bool verbose = false;
  std::string json;
  std::string compare;
  std::vector<std::string> faults;
  bool schedule = false, tiny = false;
  int patience_s = 30;
};

struct Sum {
  int tried = 0, right = 0, wrong = 0, missed = 0, ambiguous = 0, skipped = 0, cut_saves = 0;
  std::vector<double> known_ms, end_ms, next_step_ms;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 == 1 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

std::string cell(const std::vector<double>& values) {
  if (values.empty()) return "-";
  std::array<char, 64> text{};
  std::snprintf(text.data(), text.size(), "%.0f / %.0f", median(values),
                *std::max_element(values.begin(), values.end()));
  return text.data();
}

void tell(const Case& what, const Options& options, int instance, const Outcome& outcome) {
  const bool wrong = !outcome.problems.empty();
  if (!wrong && !options.verbose && outcome.skipped.empty()) return;
  std::string text = std::string(what.name) + " " + std::to_string(instance) + ": " + outcome.drawn;
  if (outcome.known_ms) text += ", known after " + std::to_string(std::lround(*outcome.known_ms)) + " ms";
  if (outcome.missed) text += ", too late";
  if (outcome.ambiguous) text += ", reported as ambiguous";
  if (!outcome.skipped.empty()) text += "\n  SKIPPED BECAUSE " + outcome.skipped;
  for (const auto& problem : outcome.problems) text += "\n  WRONG: " + problem;
  if (wrong || options.verbose) {
    text += "\n  | ";
    for (const char c : outcome.output) text += c == '\n' ? std::string("\n  | ") : std::string(1, c);
  }
  if (wrong)
    text += "\n  again: faultbox --seed " + std::to_string(options.seed) + " --case " + what.name + " --only " +
            std::to_string(instance);
  std::printf("%s\n", text.c_str());
  std::fflush(stdout);
}

void count(Sum& sum, const Outcome& outcome) {
  ++sum.tried;
  if (!outcome.skipped.empty()) {
    ++sum.skipped;
    return;
  }
  ++(outcome.problems.empty() ? sum.right : sum.wrong);
  sum.missed += outcome.missed ? 1 : 0;
  sum.ambiguous += outcome.ambiguous ? 1 : 0;
  sum.cut_saves += outcome.cut_saves;
  if (outcome.known_ms) sum.known_ms.push_back(*outcome.known_ms);
  sum.next_step_ms.insert(sum.next_step_ms.end(), outcome.next_step_ms.begin(), outcome.next_step_ms.end());
  if (outcome.end_ms) sum.end_ms.push_back(*outcome.end_ms);
}

int instances_of(const Case& what, const Options& options, bool nightly) {
  if (options.count >= 0) return options.count;
  if (!nightly) return what.in_ci;
  return what.nightly;
}

Outcome attempt(const Case& what, const Options& options, Shared& shared, int instance) {
  Draw draw(options.seed, what.name, instance);
  try {
    return what.run(shared, draw, instance);
  } catch (const std::exception& error) {
    return {.drawn = "(not finished)", .problems = {error.what()}};
  }
}

Sum run_case(const Case& what, const Options& options, Shared& shared) {
  const int instances = instances_of(what, options, shared.nightly);
  int jobs = options.jobs > 0 ? options.jobs : static_cast<int>(allowed_cpus().size());
  if (what.jobs > 0) jobs = std::min(jobs, what.jobs);
  const size_t descriptors = own_descriptors();
  Sum sum;
  std::mutex mutex;
  std::atomic<int> next{0};
  const auto work = [&] {
    for (int instance; (instance = next++) < instances;) {
      if (options.only >= 0 && instance > 0) return;
      const int number = options.only >= 0 ? options.only : options.first + instance;
      const Outcome outcome = attempt(what, options, shared, number);
      const std::lock_guard lock(mutex);
      tell(what, options, number, outcome);
      count(sum, outcome);
    }
  };
  std::vector<std::thread> workers;
  for (int job = 0; job < jobs; ++job) workers.emplace_back(work);
  for (auto& worker : workers) worker.join();
  // Of all instances together: processes that carry no mark.
  std::vector<pid_t> left;
  if (!eventually([&] { return (left = reap_orphans({})).empty(); }, std::chrono::milliseconds(1000))) {
    for (const pid_t pid : left) {
      std::printf("%s: WRONG: a process is left: %s\n", what.name, describe_process(pid).c_str());
      ::kill(pid, SIGKILL);
    }
    ++sum.wrong;
  }
  if (own_descriptors() != descriptors) {
    std::printf("%s: WRONG: %zu descriptors of the driver, %zu before\n", what.name, own_descriptors(), descriptors);
    ++sum.wrong;
  }
  return sum;
}

/// Named segments of ours in /dev/shm.
size_t named_segments() {
  size_t found = 0;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm", error)) {
    const std::string name = entry.path().filename().string();
    found += name.find("lockstep") != std::string::npos || name.find("torch") != std::string::npos ? 1 : 0;
  }
  return found;
}

int run(const Options& options) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  if (options.schedule)
    return compare_schedules(options.compare, options.seed, options.count < 0 ? 5 : options.count,
                             options.tiny ? Schedule{.steps = 20, .kills = 1, .epoch = 4} : Schedule());
  if (!options.compare.empty())
    return compare(options.compare, options.faults, options.seed, options.count < 0 ? 20 : options.count,
                   options.patience_s);
  const bool nightly = std::getenv("LOCKSTEP_NIGHTLY") != nullptr;
  std::printf("seed %lu\n", static_cast<unsigned long>(options.seed));
  std::string table, times;
  nlohmann::ordered_json json = nlohmann::json::object();
  const size_t segments = named_segments();
  int wrong = 0;
  for (const Case& what : all_cases()) {
    if (!options.cases.empty() &&
        std::find(options.cases.begin(), options.cases.end(), what.name) == options.cases.end())
      continue;
    Shared shared(nightly);
    const Sum sum = run_case(what, options, shared);
    if (!sum.next_step_ms.empty())
      times += std::string(what.name) + ": from a kill to the next finished step, median / longest of " +
               std::to_string(sum.next_step_ms.size()) + ": " + cell(sum.next_step_ms) + " ms\n";
    if (sum.cut_saves > 0)
      times += std::string(what.name) +
               ": ranks killed in the middle of a save to memory: " + std::to_string(sum.cut_saves) + "\n";
    std::array<char, 256> line{};
    std::snprintf(line.data(), line.size(), "%-12s %5d %5d %5d %8d %9d %7d  %16s  %16s\n", what.name, sum.tried,
                  sum.right, sum.wrong, sum.missed, sum.ambiguous, sum.skipped, cell(sum.known_ms).c_str(),
                  cell(sum.end_ms).c_str());
    table += line.data();
    json[what.name] = {{"what", what.what},        {"tried", sum.tried},         {"right", sum.right},
                       {"wrong", sum.wrong},       {"missed", sum.missed},       {"ambiguous", sum.ambiguous},
                       {"skipped", sum.skipped},   {"cut_saves", sum.cut_saves}, {"next_step_ms", sum.next_step_ms},
                       {"known_ms", sum.known_ms}, {"end_ms", sum.end_ms}};
    wrong += sum.wrong;
  }
  std::printf("case         tried right wrong too late ambiguous skipped  known, med / max    end, med / max (ms)\n%s",
              table.c_str());
  std::printf("%s", times.c_str());
  if (named_segments() != segments) {
    std::printf("WRONG: named segments in /dev/shm: %zu, before: %zu\n", named_segments(), segments);
    ++wrong;
  }
  if (!options.json.empty()) std::ofstream(options.json) << json.dump(2) << '\n';
  return wrong == 0 ? 0 : 1;
}

}  // namespace
}  // namespace lockstep::faultbox

int main(int argc, char** argv) {
  using lockstep::faultbox::Options;
  Options options;
  CLI::App app{"Injects faults into training runs at random, and checks how the launcher reports them."};
  std::vector<std::string> names;
  for (const auto& what : lockstep::faultbox::all_cases()) names.emplace_back(what.name);
  app.add_option("--seed", options.seed, "Seed of everything that is drawn at random");
  app.add_option("--case", options.cases, "The cases to run (default: all)")->check(CLI::IsMember(names));
  app.add_option("--count", options.count, "Instances of each case (default: a few; LOCKSTEP_NIGHTLY=1: many)");
  app.add_option("--first", options.first, "Number of the first instance, to run a long count in parts");
  app.add_option("--only", options.only, "Run only the instance of this number");
  app.add_option("--jobs", options.jobs, "Instances at a time (default: one for each core)");
  app.add_flag("--verbose", options.verbose, "Print every instance");
  app.add_option("--json", options.json, "Write all figures to this file");
  app.add_option("--compare", options.compare,
                 "Instead: compare with this Python's torchrun under the same faults, --count times each");
  app.add_option("--fault", options.faults, "The faults to compare (default: all)")
      ->check(CLI::IsMember(lockstep::faultbox::compared_faults()));
  app.add_flag("--schedule", options.schedule,
               "With --compare: kill ranks at the same steps under both launchers, and compare what is lost")
      ->needs("--compare");
  app.add_flag("--tiny", options.tiny, "With --schedule: one kill in 20 steps")->needs("--schedule");
  app.add_option("--patience", options.patience_s, "Seconds after which a compared run counts as hanging");
  CLI11_PARSE(app, argc, argv);
  return lockstep::faultbox::run(options);
}
