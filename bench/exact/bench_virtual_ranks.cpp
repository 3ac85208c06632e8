// What virtual ranks cost: a step in which each rank works for several of them, beside a step that accumulates as many
// micro-batches. With --each 1 every rank is one virtual rank, and the step beside it is an ordinary one.
//
//     lockstep run -n 2 -- build/bin/bench_virtual_ranks --model mlp --each 4
//
// Both take turns, in blocks of steps. They use the same micro-batches, so they must come to the same parameters but
// for the order of additions, which is checked first.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <string>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "step/models.h"

namespace {

using namespace lockstep;  // NOLINT

struct Options {
  std::string model = "mlp", json;
  int each = 4, rounds = 8, steps = 20;
};

struct Side {
  std::vector<double> seconds;  ///< of each step
  StateDict parameters;         ///< after the last block
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

/// One block of steps, of a new model.
void run_block(const Options& options, bool is_virtual, int world_size, Side& side) {
  ContextOptions how{.seed = 1, .threads = 1, .announce = false};
  if (is_virtual) how.virtual_ranks = world_size * options.each;
  Context context(how);
  const auto net = bench::make_model(options.model);
  Replica model(net, context.group());
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.01));
  std::vector<bench::Batch> batches;
  for (int i = 0; i < options.each; ++i)
    batches.push_back(bench::make_batch(options.model, context.rank() * options.each + i));
  const auto accumulation = model.accumulate(is_virtual ? 1 : options.each);
  const auto step = [&] {
    for (int i = 0; i < options.each; ++i) {
      if (is_virtual) context.enter_virtual_rank(context.virtual_block().first + i);
      const auto& [data, target] = batches[static_cast<size_t>(i)];
      const at::Tensor loss = net->loss(data, target);
      (is_virtual ? loss : loss / options.each).backward();
    }
    optimizer.step();
    optimizer.zero_grad();
  };
  for (int i = 0; i < 3; ++i) step();
  context.group().barrier();
  for (int i = 0; i < options.steps; ++i) {
    const auto start = std::chrono::steady_clock::now();
    step();
    side.seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  context.group().barrier();
  side.parameters.clear();
  for (const auto& item : state_dict(*net)) side.parameters.insert(item.key(), item.value().clone());
}

void check(const Side& one, const Side& other) {
  for (const auto& item : one.parameters)
    if (!at::allclose(item.value(), other.parameters[item.key()], 1e-3, 1e-4))
      throw Error("virtual ranks and accumulation came to different values of " + item.key());
}

int run(const Options& options) {
  int world_size = 1, rank = 0;
  {
    const Context context({.announce = false});
    world_size = context.world_size();
    rank = context.rank();
  }
  Side accumulated, virtual_ranks;
  for (int round = 0; round < options.rounds; ++round)
    for (const bool is_virtual : {round % 2 == 0, round % 2 != 0}) {
      run_block(options, is_virtual, world_size, is_virtual ? virtual_ranks : accumulated);
      if (round == 0 && !accumulated.seconds.empty() && !virtual_ranks.seconds.empty())
        check(accumulated, virtual_ranks);
    }
  if (rank != 0) return 0;
  const double beside = median(accumulated.seconds), with = median(virtual_ranks.seconds);
  std::printf("%s, %d ranks, %d virtual ranks each: a step takes %.2f ms, accumulation %.2f ms: %.3f of it\n",
              options.model.c_str(), world_size, options.each, 1e3 * with, 1e3 * beside, with / beside);
  if (options.json.empty()) return 0;
  std::ofstream(options.json) << nlohmann::json{{"model", options.model},        {"ranks", world_size},
                                                {"each", options.each},          {"accumulation_seconds", beside},
                                                {"virtual_ranks_seconds", with}, {"ratio", with / beside}}
                                     .dump(2);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"What virtual ranks cost, beside accumulation of as many micro-batches."};
  app.add_option("--model", options.model, "mlp, resnet, transformer or small_1000")->capture_default_str();
  app.add_option("--each", options.each, "Virtual ranks of a rank")->check(CLI::Range(1, 64))->capture_default_str();
  app.add_option("--rounds", options.rounds, "Blocks of each side")->check(CLI::Range(1, 1000))->capture_default_str();
  app.add_option("--steps", options.steps, "Steps in a block")->check(CLI::Range(1, 10000))->capture_default_str();
  app.add_option("--json", options.json, "File for the figures");
  app.footer(kRanksHelp);
  return run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    return run(options);
  });
}
