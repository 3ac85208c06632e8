// What batch norm over all ranks costs beside each rank's own: forward and backward of a stack of layers, taking turns.
//
//     lockstep run -n 2 -- build/bin/bench_sync_batch_norm --json sync_batch_norm.json
//
// The output is compared with batch norm of all ranks' inputs in one batch before anything is timed.
//
//     lockstep run -n 2 -- build/bin/bench_sync_batch_norm --gan
//
// instead trains a small GAN on all ranks with one thread each, and in turns on rank 0 alone with the whole batch and
// as many threads as there are ranks. In double both get the same weights, which is seen to first.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include "gan.h"

namespace {

using Clock = std::chrono::steady_clock;
namespace nn = torch::nn;

struct Options {
  int rounds = 30;
  int layers = 20;
  int64_t channels = 64;
  int64_t batch_size = 16;
  int64_t side = 16;
  bool tiny = false, gan = false;
  std::string json;
};

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

nn::Sequential make_stack(const Options& options) {
  nn::Sequential stack;
  for (int layer = 0; layer < options.layers; ++layer) stack->push_back(nn::BatchNorm2d(options.channels));
  return stack;
}

void check(nn::Sequential& synchronised, const torch::Tensor& input, const Options& options,
           const lockstep::Context& context) {
  nn::Sequential alone = make_stack(options);
  const torch::Tensor whole = alone->forward(context.group().all_gather(input).flatten(0, 1));
  const torch::Tensor own = synchronised->forward(input);
  const double apart =
      (whole.narrow(0, context.rank() * options.batch_size, options.batch_size) - own).abs().max().item<double>();
  if (apart > 1e-4)
    throw lockstep::Error("the output differs by " + std::to_string(apart) + " from batch norm of the whole batch");
}

/// Milliseconds of forward and backward.
double timed(nn::Sequential& stack, const torch::Tensor& input, const lockstep::Context& context) {
  context.group().barrier();
  const auto start = Clock::now();
  stack->forward(input).sum().backward();
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

nlohmann::ordered_json measure(const Options& options, const lockstep::Context& context) {
  const torch::Tensor input =
      torch::randn({options.batch_size, options.channels, options.side, options.side}).requires_grad_();
  nn::Sequential plain = make_stack(options), synchronised = make_stack(options);
  lockstep::convert_sync_batchnorm(*synchronised, context.group());
  check(synchronised, input.detach(), options, context);
  std::vector<double> own, all;
  for (int round = -2; round < options.rounds; ++round) {
    const double one = timed(plain, input, context), other = timed(synchronised, input, context);
    if (round < 0) continue;
    own.push_back(one);
    all.push_back(other);
  }
  const double own_ms = median(own), all_ms = median(all);
  return {{"ranks", context.world_size()},
          {"layers", options.layers},
          {"values_a_layer", input.numel()},
          {"batch_norm_ms", own_ms},
          {"sync_batch_norm_ms", all_ms},
          {"ratio", all_ms / own_ms},
          {"more_us_a_layer", (all_ms - own_ms) * 1e3 / options.layers}};
}

/// Milliseconds of a step: on all ranks, and on rank 0 alone with the whole batch. The others wait meanwhile.
class GanRounds {
 public:
  GanRounds(const Options& options, lockstep::Context& context) : options_(options), context_(context) {
    torch::manual_seed(2);  // the same data on every rank
    const int64_t whole = options.batch_size * context.world_size();
    images_ = torch::rand({whole, 1, 28, 28}) * 2 - 1;
    noise_ = torch::randn({whole, 64});
  }

  nlohmann::ordered_json measure() {
    check();
    std::vector<double> one, all;
    for (int round = -2; round < options_.rounds; ++round) {
      const double together = all_ranks(), alone = one_process();
      if (round < 0) continue;
      all.push_back(together);
      one.push_back(alone);
    }
    const double one_ms = median(one), all_ms = median(all);
    return {{"ranks", context_.world_size()},
            {"batch_size", options_.batch_size},
            {"one_process_ms", one_ms},
            {"ranks_ms", all_ms},
            {"speed", one_ms / all_ms}};
  }

 private:
  template <typename Step>
  double timed(const Step& step) {
    const auto start = Clock::now();
    for (int i = 0; i < kSteps; ++i) step();
    return std::chrono::duration<double, std::milli>(Clock::now() - start).count() / kSteps;
  }
  torch::Tensor own(const torch::Tensor& whole) const {
    return whole.narrow(0, context_.rank() * options_.batch_size, options_.batch_size);
  }
  double all_ranks() {
    torch::set_num_threads(1);
    context_.group().barrier();
    return timed([&] { together_.step(own(images_), own(noise_)); });
  }
  double one_process() {
    double ms = 0;
    if (context_.is_main()) {
      torch::set_num_threads(context_.world_size());
      ms = timed([&] { alone_.step(images_, noise_); });
    }
    context_.group().barrier();
    return ms;
  }
  void check() {
    Gan together(&context_, torch::kDouble), alone(nullptr, torch::kDouble);
    const torch::Tensor images = images_.to(torch::kDouble), noise = noise_.to(torch::kDouble);
    for (int step = 0; step < 3; ++step) {
      together.step(own(images), own(noise));
      alone.step(images, noise);
    }
    const double apart = (together.weights() - alone.weights()).abs().max().item<double>();
    if (apart > 1e-10)
      throw lockstep::Error("the weights differ by " + std::to_string(apart) + " from those of one process");
  }

  static constexpr int kSteps = 5;
  const Options options_;
  lockstep::Context& context_;
  torch::Tensor images_, noise_;
  Gan together_{&context_}, alone_{nullptr};
};

void say(const nlohmann::ordered_json& figures, bool gan) {
  if (gan)
    std::printf("a step of a GAN: one process with the whole batch %.2f ms, %d ranks %.2f ms: %.2f of its speed\n",
                figures["one_process_ms"].get<double>(), figures["ranks"].get<int>(), figures["ranks_ms"].get<double>(),
                figures["speed"].get<double>());
  else
    std::printf(
        "%d layers, %ld values each: torch's batch norm %.2f ms, over %d ranks %.2f ms: %.2f x, %.0f us a layer\n",
        figures["layers"].get<int>(), figures["values_a_layer"].get<long>(), figures["batch_norm_ms"].get<double>(),
        figures["ranks"].get<int>(), figures["sync_batch_norm_ms"].get<double>(), figures["ratio"].get<double>(),
        figures["more_us_a_layer"].get<double>());
}

}  // namespace

int main(int argc, char** argv) try {
  Options options;
  const CLI::Range at_least_one(1, 1 << 20);
  CLI::App app{"What synchronised batch norm costs beside torch's."};
  app.add_flag("--tiny", options.tiny, "A few rounds, to see that it works");
  app.add_flag("--gan", options.gan, "A small GAN on all ranks, beside one process with the whole batch");
  app.add_option("--rounds", options.rounds, "Forward and backward of each stack")->check(at_least_one);
  app.add_option("--layers", options.layers, "Layers of a stack")->check(at_least_one);
  app.add_option("--channels", options.channels, "Of each layer")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Images on each rank")->check(at_least_one);
  app.add_option("--side", options.side, "Of an image, in pixels")->check(at_least_one);
  app.add_option("--json", options.json, "File for the figures");
  CLI11_PARSE(app, argc, argv);
  if (options.tiny) options.rounds = 3, options.layers = 4, options.side = 4;
  lockstep::Context context(argc, argv, {.seed = 1});
  const nlohmann::ordered_json figures =
      options.gan ? GanRounds(options, context).measure() : measure(options, context);
  if (!context.is_main()) return 0;
  say(figures, options.gan);
  if (!options.json.empty()) std::ofstream(options.json) << figures.dump(2) << "\n";
  return 0;
} catch (const std::exception& error) {
  std::fprintf(stderr, "bench_sync_batch_norm: %s\n", error.what());
  return 1;
}
