// What a data-parallel step costs on one machine, beside the same programs without communication and beside PyTorch's:
//
//     build/bin/bench_step --ranks 2 --json step.json
//     python3 bench/step/report.py step.json
//     python3 bench/step/plot.py step.json step.svg
//
// This process measures nothing: it starts each system's workers (workers/job.h), checks that all compute the same, and
// lets them take turns (step_contest.h). Times are taken in the workers, one thread a rank.

#include <cstdio>
#include <fstream>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "step_contest.h"
#include "step_systems.h"
#include "workers/machine.h"

namespace {

namespace bench = lockstep::bench;

struct Options {
  int ranks = 2;
  int rounds = bench::StepContestOptions{}.rounds;
  double slice_ms = bench::StepContestOptions{}.slice_ms;
  std::string json;
  std::string python = BENCH_STEP_PYTHON;
  bool tiny = false;
  /// All but small_10000, whose steps are long, and linear_100m, of which each system takes gigabytes.
  std::vector<std::string> models{std::begin(bench::kStepModels), std::end(bench::kStepModels) - 2};
  std::vector<std::string> optimizers{"sgd"};
  std::vector<std::string> systems{std::begin(bench::kStepSystems), std::end(bench::kStepSystems)};
};

const nlohmann::ordered_json kDefinitions = {
    {"step", "zero_grad, forward, backward, optimizer step (sgd: with momentum), one thread a rank"},
    {"median_ms", "over all steps of all rounds; of a step the mean over ranks"},
    {"cpu_ms",
     "processor time of a step, all threads of a rank, the mean over ranks, the median over rounds; less "
     "disturbed by strangers than wall time, and blind to waiting that sleeps"},
    {"ratio", "the median of a round over the first system's of the same round; the median over rounds"},
    {"attach_ms", "to attach to the model: the first time, parameters and buffers included"},
    {"peak_mib",
     "the most memory a rank held until it had trained 17 steps, or 5 and then a second's (linear_100m: 2): pages of "
     "its own, and its part of shared ones"},
    {"models",
     "mlp: 784-2048-2048-10, batch 64; resnet: small, 28x28, batch 64; transformer: 6 layers of width 256, 4 x 64 "
     "tokens; "
     "small_1000: 1000 parameters of 64 floats, small_10000: 10000; linear_100m: 100 M parameters, attached and "
     "checked only"}};

bench::StepContestOptions contest_options(const Options& options, const std::string& model) {
  bench::StepContestOptions contest{.rounds = options.rounds, .slice_ms = options.slice_ms};
  if (options.tiny) contest.rounds = 1, contest.slice_ms = 1;
  if (model == "linear_100m") contest.rounds = 0, contest.check_steps = 2, contest.settling_steps = 0;
  return contest;
}

void run(const Options& options) {
  nlohmann::ordered_json rows = nlohmann::ordered_json::array(), failed = nlohmann::ordered_json::object();
  nlohmann::ordered_json json = {
      {"host", bench::host_facts()}, {"ranks", options.ranks}, {"definitions", kDefinitions}};
  const bench::ScratchFolder scratch("bench_step");
  for (const std::string& model : options.models)
    for (const std::string& optimizer : options.optimizers) {
      const bench::StepWork work{.model = model, .optimizer = optimizer, .ranks = options.ranks};
      std::vector<bench::System> systems;
      for (const std::string& system : options.systems)
        systems.push_back(bench::make_step_system(system, work, bench::build_folder(), options.python));
      bench::StepContest contest(work, std::move(systems), contest_options(options, model),
                                 scratch.path() + "/" + model + "_" + optimizer);
      contest.run();
      for (const auto& row : contest.rows()) rows.push_back(row);
      for (const auto& [name, reason] : contest.failed()) failed[name] = reason;
      json["failed"] = failed;
      json["rows"] = rows;
      std::ofstream file(options.json);  // after every contest, so that a run may be cut short
      file << json.dump(1) << '\n';
      if (!file.flush()) throw std::runtime_error("cannot write " + options.json);
    }
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{
      "Measures data-parallel steps on one machine, all systems in interleaved rounds, results checked first."};
  const auto names = [](const auto& list) {
    return CLI::IsMember(std::vector<std::string>(std::begin(list), std::end(list)));
  };
  app.add_option("--ranks", options.ranks)->capture_default_str()->check(CLI::Range(2, 64));
  app.add_option("--json", options.json, "File for the figures")->required();
  app.add_option("--rounds", options.rounds)->capture_default_str()->check(CLI::Range(1, 1000));
  app.add_option("--slice-ms", options.slice_ms, "Time of one system in one round")->capture_default_str();
  app.add_option("--models", options.models)->delimiter(',')->check(names(bench::kStepModels))->capture_default_str();
  app.add_option("--optimizers", options.optimizers)
      ->delimiter(',')
      ->check(names(bench::kStepOptimizers))
      ->capture_default_str();
  app.add_option("--systems", options.systems, "The first is what the others are compared with")
      ->delimiter(',')
      ->check(names(bench::kStepSystems))
      ->capture_default_str();
  app.add_option("--python", options.python, "Python that imports torch, for PyTorch's systems")->capture_default_str();
  app.add_flag("--tiny", options.tiny, "One round of few steps: does it work at all?");
  CLI11_PARSE(app, argc, argv);
  bench::remember_interrupts();
  try {
    run(options);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "bench_step: %s\n", error.what());
    return 1;
  }
}
