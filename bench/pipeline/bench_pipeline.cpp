// The time of a pipeline's step over the least that its schedule allows.
//
//     lockstep run -n 4 -- build/bin/bench_pipeline [--tiny] [--rows N] [--wait MS] [--micro-batches M] [--json FILE]
//
// A rank is a stage. First its layer waits as long as a device would compute: MS milliseconds for a micro-batch's
// forward, twice as long for its backward, so that four stages can be measured on two cores. Then, if there is a core
// for each stage, layers compute. The bound of M micro-batches in S stages is (M + S - 1) times a stage's time for one:
// what it waits, and what it takes when all ranks work on one at the same time. What a stage sends for a micro-batch is
// N x 65,536 floats.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

using Clock = std::chrono::steady_clock;
namespace nn = torch::nn;

struct Options {
  bool tiny = false;
  int rows = 4;
  double wait = 10;
  int micro_batches = 8;
  std::string json;
};

constexpr int64_t kLength = 128, kWidth = 512;

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + static_cast<ptrdiff_t>(values.size() / 2), values.end());
  return values[values.size() / 2];
}

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

/// Passes its input and its gradient on after a while.
struct Wait : torch::autograd::Function<Wait> {
  static torch::Tensor forward(torch::autograd::AutogradContext* context, const torch::Tensor& input, double wait) {
    context->saved_data["wait"] = wait;
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(wait));
    return input.view_as(input);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& gradients) {
    const double wait = 2 * context->saved_data["wait"].toDouble();
    std::this_thread::sleep_for(std::chrono::duration<double, std::milli>(wait));
    return {gradients[0], torch::Tensor()};
  }
};

struct WaitingLayerImpl : nn::Module {
  explicit WaitingLayerImpl(double wait_) : wait(wait_) { scale = register_parameter("scale", torch::ones({kWidth})); }
  torch::Tensor forward(const torch::Tensor& input) { return Wait::apply(input * scale, wait); }
  double wait;
  torch::Tensor scale;
};
TORCH_MODULE(WaitingLayer);

struct ComputingLayerImpl : nn::Module {
  ComputingLayerImpl() {
    register_module("in", in = nn::Linear(kWidth, 4 * kWidth));
    register_module("out", out = nn::Linear(4 * kWidth, kWidth));
  }
  torch::Tensor forward(const torch::Tensor& input) { return out(torch::gelu(in(input))); }
  nn::Linear in{nullptr}, out{nullptr};
};
TORCH_MODULE(ComputingLayer);

torch::Tensor loss_of(const torch::Tensor& output, const torch::Tensor& target) {
  return (output - target).square().mean();
}

struct Batch {
  explicit Batch(const Options& options) {
    torch::manual_seed(1);  // the same on all ranks
    input = torch::randn({options.rows * options.micro_batches, kLength, kWidth});
    target = torch::tanh(input);
  }
  torch::Tensor input, target;
};

/// The median of some steps, of the slowest rank.
double time_of(lockstep::Pipeline& pipeline, const Batch& batch, const Options& options,
               const lockstep::Context& context) {
  std::vector<double> times;
  for (int round = options.tiny ? -1 : -3; round < (options.tiny ? 1 : 9); ++round) {
    pipeline.layers()->zero_grad();
    context.group().barrier();
    const auto start = Clock::now();
    (void)pipeline.forward_backward(batch.input, batch.target, loss_of);
    torch::Tensor time = torch::tensor({milliseconds_since(start)}, torch::kDouble);
    context.group().all_reduce(time, lockstep::ReduceOp::kMax);
    if (round >= 0) times.push_back(time.item<double>());
  }
  return median(times);
}

/// The median time of a stage's work on one micro-batch, by all ranks at the same time, as in the pipeline.
double time_of_stage(lockstep::Pipeline& pipeline, const Batch& batch, const Options& options,
                     const lockstep::Context& context) {
  std::vector<double> times;
  const torch::Tensor input = batch.input.slice(0, 0, options.rows).clone();
  for (int round = -3; round < (options.tiny ? 1 : 15); ++round) {
    context.group().barrier();
    const auto start = Clock::now();
    const torch::Tensor given = input.detach().requires_grad_();
    const auto guard = pipeline.replica().no_sync();
    loss_of(pipeline.replica()(given), input).backward();
    torch::Tensor time = torch::tensor({milliseconds_since(start)}, torch::kDouble);
    context.group().all_reduce(time, lockstep::ReduceOp::kMax);
    if (round >= 0) times.push_back(time.item<double>());
  }
  pipeline.layers()->zero_grad();
  return median(times);
}

nlohmann::json measure(const char* what, const std::vector<lockstep::Pipeline::MakeLayer>& layers,
                       const Options& options, const lockstep::Context& context, bool waits) {
  lockstep::Pipeline pipeline(layers, context, {.micro_batches = options.micro_batches});
  const Batch batch(options);
  const double got = pipeline.forward_backward(batch.input, batch.target, loss_of);
  if (const double expected = loss_of(batch.input, batch.target).item<double>();
      waits && std::abs(got - expected) > 1e-5 * expected)
    throw lockstep::Error("the loss is wrong");
  const int units = options.micro_batches + context.world_size() - 1;
  const double stage = time_of_stage(pipeline, batch, options, context);
  const double time = time_of(pipeline, batch, options, context);
  const double mib = static_cast<double>(options.rows * kLength * kWidth * 4) / (1 << 20);
  nlohmann::json figures{
      {"stages", context.world_size()}, {"step_ms", time}, {"stage_ms", stage}, {"over_bound", time / (units * stage)}};
  if (waits) figures["over_waiting"] = time / (units * 3 * options.wait);
  if (!context.is_main()) return figures;
  std::printf("%s: %d stages, %d micro-batches of %.1f MiB: %.1f ms a step", what, context.world_size(),
              options.micro_batches, mib, time);
  if (waits)
    std::printf(", waiting alone %.1f ms: %.3f x", units * 3 * options.wait, time / (units * 3 * options.wait));
  std::printf(", a stage by itself takes %.1f ms, bound %.1f ms: %.3f x\n", stage, units * stage,
              time / (units * stage));
  return figures;
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"The time of a pipeline's step over the least that its schedule allows."};
  app.add_flag("--tiny", options.tiny, "A look at whether it runs");
  app.add_option("--rows", options.rows, "Samples of a micro-batch, of 256 KiB each")->capture_default_str();
  app.add_option("--wait", options.wait, "Milliseconds of a micro-batch's forward in a stage")->capture_default_str();
  app.add_option("--micro-batches", options.micro_batches, "Of a batch")->capture_default_str();
  app.add_option("--json", options.json, "File for the figures");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    if (options.tiny) options.rows = 1, options.wait = 1;
    const lockstep::Context context({.seed = 1});
    torch::set_num_threads(1);
    using Layers = std::vector<lockstep::Pipeline::MakeLayer>;
    const auto stages = static_cast<size_t>(context.world_size());
    const auto waiting = [&] { return nn::AnyModule(WaitingLayer(options.wait)); };
    nlohmann::json figures;
    figures["wait"] = measure("layers that wait", Layers(stages, waiting), options, context, /*waits=*/true);
    const auto computing = [] { return nn::AnyModule(ComputingLayer()); };
    if (std::thread::hardware_concurrency() >= stages)
      figures["compute"] = measure("layers that compute", Layers(stages, computing), options, context, /*waits=*/false);
    if (context.is_main() && !options.json.empty()) std::ofstream(options.json) << figures.dump(2) << '\n';
    return 0;
  });
}
