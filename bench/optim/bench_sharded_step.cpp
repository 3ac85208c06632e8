// The sum of all ranks' gradients and a step of AdamW, on several ranks: an all-reduce and each rank stepping its own
// copy by LibTorch's optimizer or by the same kernels, the ranks sharing out the step after an all-reduce, the ranks
// sharing out both, and the same with shared parameters where ranks share memory. No backward: every rank's gradients
// are the same and stay as they are.
//
//     lockstep run -n 2 -- build/bin/bench_sharded_step [--rounds 20] [--width 2048] [--threads 1] [--backend gloo]
//         [--json FILE] [--tiny]
//
// The systems take turns, after all have come to the same bits. Rank 0's times, from when all ranks begin to when all
// have ended.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <map>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Clock = std::chrono::steady_clock;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;

struct Options {
  int rounds = 20, threads = 1;
  int64_t width = 2048;
  bool tiny = false;
  std::string json, backend;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

/// bench_step's mlp, with gradients in it that all ranks share.
struct Contestant {
  Contestant(const std::string& system, const Options& options, const lockstep::Context& context)
      : net(torch::nn::Linear(784, options.width), torch::nn::Linear(options.width, options.width),
            torch::nn::Linear(options.width, 10)),
        model(net, context) {
    torch::manual_seed(5);
    for (torch::Tensor& parameter : net->parameters()) {
      parameter.data().copy_(torch::randn_like(parameter) / 10);
      // Numbers of few bits, whose mean over ranks is the number itself.
      parameter.mutable_grad() = (torch::randn_like(parameter) * 256).round() / 256;
    }
    const AdamWOptions defaults(1e-3);
    using Fused = lockstep::ZeroRedundancyOptimizer<AdamW>;
    if (system == "libtorch") optimizer = std::make_unique<AdamW>(net->parameters(), defaults);
    if (system == "alone") optimizer = std::make_unique<Fused>(net->parameters(), defaults);
    if (system == "reduced") model.register_comm_hook(lockstep::all_reduce_hook());
    if (system == "sharded" || system == "reduced") optimizer = std::make_unique<Fused>(model, defaults);
    if (system == "shared")
      optimizer = std::make_unique<Fused>(model, defaults, lockstep::ZeroRedundancyOptions{.shared_parameters = true});
  }

  torch::nn::Sequential net;
  lockstep::DistributedDataParallel<torch::nn::Sequential> model;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

using Contest = std::map<std::string, std::unique_ptr<Contestant>>;

/// Milliseconds.
double timed(Contestant& contestant, const lockstep::Context& context) {
  context.group().barrier();
  const auto start = Clock::now();
  contestant.model.reduce_gradients();  // of those that step by themselves
  contestant.optimizer->step();
  context.group().barrier();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void verify(Contest& contest, const lockstep::Context& context) {
  for (const auto& [system, contestant] : contest)
    for (int step = 0; step < 3; ++step) timed(*contestant, context);
  const auto expected = contest.at("alone")->net->parameters();
  for (const auto& [system, contestant] : contest) {
    const auto parameters = contestant->net->parameters();
    for (size_t i = 0; i < parameters.size(); ++i)
      if (system == "libtorch" ? !parameters[i].allclose(expected[i], 1e-5, 1e-6) : !parameters[i].equal(expected[i]))
        throw lockstep::Error(system + " has come to other parameters");
  }
}

nlohmann::ordered_json measure(const Options& options, const lockstep::Context& context) {
  Contest contest;
  for (const char* system : {"libtorch", "alone", "reduced", "sharded", "shared"})
    if (context.group().backend() != "gloo" || std::string(system) != "shared")
      contest.emplace(system, std::make_unique<Contestant>(system, options, context));
  verify(contest, context);
  std::map<std::string, std::vector<double>> times, ratios;
  for (int round = 0; round < options.rounds; ++round) {
    std::map<std::string, double> mine;
    for (const auto& [system, contestant] : contest) {
      std::vector<double> steps;
      for (int step = 0; step < 5; ++step) steps.push_back(timed(*contestant, context));
      mine[system] = median(steps);
    }
    for (const auto& [system, time] : mine) {
      times[system].push_back(time);
      ratios[system].push_back(time / mine["alone"]);
    }
  }
  nlohmann::ordered_json rows = nlohmann::ordered_json::array();
  for (const auto& [system, mine] : times)
    rows.push_back({{"system", system},
                    {"ranks", context.world_size()},
                    {"median_ms", median(mine)},
                    {"min_ms", *std::min_element(mine.begin(), mine.end())},
                    {"over_alone", median(ratios[system])}});
  return rows;
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  CLI::App app{"A step of AdamW that ranks share out, beside each rank stepping its own copy."};
  app.add_option("--rounds", options.rounds, "Of five steps of each system")->check(CLI::Range(1, 100000));
  app.add_option("--width", options.width, "Of the middle layer")->check(CLI::Range(1, 100000));
  app.add_option("--backend", options.backend, "As ContextOptions has it");
  app.add_option("--threads", options.threads, "Of each rank")->check(CLI::Range(1, 1024));
  app.add_option("--json", options.json, "File for the figures");
  app.add_flag("--tiny", options.tiny, "To see that it works");
  CLI11_PARSE(app, argc, argv);
  if (options.tiny) options.rounds = 2, options.width = 64;
  const lockstep::Context context(argc, argv, {.seed = 1, .backend = options.backend});
  torch::set_num_threads(options.threads);
  const nlohmann::ordered_json rows = measure(options, context);
  if (!context.is_main()) return 0;
  for (const auto& row : rows)
    std::printf("%-10s %8.2f ms, at least %8.2f ms: %.2f of each rank alone\n",
                row["system"].get<std::string>().c_str(), row["median_ms"].get<double>(), row["min_ms"].get<double>(),
                row["over_alone"].get<double>());
  if (!options.json.empty()) std::ofstream(options.json) << rows.dump(2) << "\n";
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_sharded_step: %s\n", error.what());
  return 1;
}
