#include "faultbox/cases.h"

#include <algorithm>
#include <stdexcept>

#include "base/hash.h"

namespace lockstep::faultbox {

Draw::Draw(uint64_t seed, const std::string& name, int instance) {
  std::seed_seq sequence{static_cast<uint32_t>(seed),     static_cast<uint32_t>(seed >> 32),
                         static_cast<uint32_t>(instance), static_cast<uint32_t>(name.size()),
                         static_cast<uint32_t>(name[0]),  static_cast<uint32_t>(name[1])};
  engine_.seed(sequence);
}

int64_t Draw::number(int64_t first, int64_t last) {
  return first + static_cast<int64_t>(engine_() % static_cast<uint64_t>(last - first + 1));
}

std::string Shared::reference(int ranks, int steps, const std::string& kind) {
  const std::lock_guard lock(mutex_);
  std::string& hash = references_[{ranks, steps, kind}];
  if (!hash.empty()) return hash;
  Run run({.ranks = ranks, .words = {"steps=" + std::to_string(steps), kind}});
  const bool in_time = run.wait(kLongest);
  hash = run.result();
  const auto problems = run.audit();
  if (!in_time || run.exit_code() != 0 || hash.empty() || !problems.empty())
    throw std::runtime_error("a training without any fault failed with code " + std::to_string(run.exit_code()) + "\n" +
                             (problems.empty() ? "" : problems[0] + "\n") + run.report().text);
  return hash;
}

void add(std::vector<std::string>& problems, const std::vector<std::string>& more) {
  problems.insert(problems.end(), more.begin(), more.end());
}

namespace {

std::string list(const std::vector<int>& numbers) {
  std::string text;
  for (const int number : numbers) text += (text.empty() ? "" : " or ") + std::to_string(number);
  return text;
}

bool has(const std::vector<int>& numbers, int number) {
  return std::find(numbers.begin(), numbers.end(), number) != numbers.end();
}

}  // namespace

void expect(Outcome& outcome, Run& run, const Expectation& expected) {
  const Report report = run.report();
  outcome.output = report.text;
  auto& problems = outcome.problems;
  if (!has(expected.codes, run.exit_code()))
    problems.push_back("exit code " + std::to_string(run.exit_code()) + " instead of " + list(expected.codes));
  if (!report.culprit) {
    problems.emplace_back("no rank is named");
  } else if (!has(expected.culprits, *report.culprit)) {
    problems.push_back("names rank " + std::to_string(*report.culprit) + " instead of " + list(expected.culprits));
  }
  outcome.ambiguous = !report.also_suspect.empty();
  if (expected.fault_ns != 0) {
    const double lag_ms = static_cast<double>(run.lag_ns(expected.fault_ns)) / 1e6;
    outcome.end_ms = static_cast<double>(run.ended_ns() - expected.fault_ns) / 1e6;
    if (report.known_ns) outcome.known_ms = static_cast<double>(*report.known_ns - expected.fault_ns) / 1e6;
    if (outcome.known_ms && *outcome.known_ms > 1e3 * expected.known_within_s + lag_ms)
      problems.push_back("known after " + std::to_string(*outcome.known_ms) + " ms");
    if (*outcome.end_ms > 1e3 * expected.end_within_s + lag_ms)
      problems.push_back("ended after " + std::to_string(*outcome.end_ms) + " ms");
  }
  add(problems, report.problems);
  add(problems, run.audit());
}

void expect_same_result(Outcome& outcome, Run& run, Shared& shared, int ranks, int steps, const std::string& kind) {
  outcome.output = run.report().text;
  if (run.exit_code() != 0)
    outcome.problems.push_back("exit code " + std::to_string(run.exit_code()) + " instead of 0");
  else if (const std::string expected = shared.reference(ranks, steps, kind); run.result() != expected)
    outcome.problems.push_back("its result is " + run.result() + ", not " + expected);
  add(outcome.problems, run.audit());
}

const std::vector<Case>& all_cases() {
  static const std::vector<Case> cases = {
      {"kill", "SIGKILL of a random rank at a random instant", 50, 1000, 0, kill_case},
      {"sharded", "SIGKILL of a rank of an optimizer whose steps ranks share out", 21, 300, 0, sharded_case},
      {"launcher", "SIGKILL of the launcher", 20, 200, 0, launcher_case},
      {"two", "two ranks killed together, or the second during the shutdown", 20, 200, 0, two_case},
      {"stop", "SIGSTOP, and SIGCONT later or never", 10, 100, 0, stop_case},
      {"crash", "SIGSEGV, abort, exception, exit(0), _exit(3), a fork that stays, no memory", 21, 140, 0, crash_case},
      {"collectives", "one rank leaves a collective out or calls another one", 30, 206, 0, collectives_case},
      {"output", "a flood of output, a closed terminal, a full disk", 6, 20, 2, output_case},
      {"preempt", "SIGTERM or SIGUSR1 to the launcher or a rank", 10, 100, 0, preempt_case},
      {"restart", "a rank killed under --max-restarts 1: once, again, in every start", 8, 100, 0, restart_case},
      {"elastic", "ranks killed, also in saves to memory, and resized, again and again under --elastic", 40, 500, 0,
       elastic_case},
      {"mlp", "a rank of an MLP of 5.8 million parameters killed; it goes on from memory", 2, 20, 1, mlp_case},
  };
  return cases;
}

}  // namespace lockstep::faultbox
