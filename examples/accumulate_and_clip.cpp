// One step of the optimizer from several small batches, with clipped gradients: the same step that a batch too large
// for memory would have made.
//
//     lockstep run -n 2 -- build/bin/accumulate_and_clip
//
// prints
//
//     4 batches of 8 on each of 2 ranks, 3 steps
//     step 1: passes 4, reductions 1, norm of the gradients 0.92, clipped to 0.50
//     step 2: passes 4, reductions 1, norm of the gradients 0.45, clipped to 0.45
//     step 3: passes 4, reductions 1, norm of the gradients 0.85, clipped to 0.50
//     one batch of 32 on each rank instead: the same weights to 1e-6

#include <cstdio>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

struct Options {
  int accumulate = 4;
  int batch_size = 8;
  double max_norm = 0.5;
  int steps = 3;
};

struct NetImpl : torch::nn::Module {
  /// x [n, 16]; returns [n, 1].
  torch::Tensor forward(const torch::Tensor& x) { return last(torch::tanh(first(x))); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(16, 32))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(32, 1))};
};
TORCH_MODULE(Net);

/// A model and its optimizer; both instances start from the same weights.
struct Training {
  explicit Training(const lockstep::Context& context)
      : net((torch::manual_seed(1), Net())), model(net, context), optimizer(net->parameters(), 0.5) {}

  /// data and target of this rank's share of the step, in equal pieces.
  void step(const torch::Tensor& data, const torch::Tensor& target, const Options& options, int pieces, bool say) {
    const int64_t reductions = model.stats().reductions;
    double norm = 0;
    {
      const auto accumulation = model.accumulate(pieces);  // all but the last backward stay on this rank
      const auto targets = target.chunk(pieces);
      size_t i = 0;
      for (const torch::Tensor& piece : data.chunk(pieces)) {
        // The mean of the pieces' means is the mean of the whole.
        (torch::mse_loss(model(piece), targets[i++]) / pieces).backward();
        if (accumulation.complete()) norm = model.clip_grad_norm(options.max_norm);
      }
    }
    optimizer.step();
    optimizer.zero_grad();
    if (!say) return;
    ++steps;
    std::printf("step %d: passes %d, reductions %ld, norm of the gradients %.2f, clipped to %.2f\n", steps, pieces,
                model.stats().reductions - reductions, norm, std::min(norm, options.max_norm));
  }

  Net net;
  lockstep::DistributedDataParallel<Net> model;
  torch::optim::SGD optimizer;
  int steps = 0;
};

double difference(const Net& a, const Net& b) {
  const auto vector = [](const Net& net) { return torch::nn::utils::parameters_to_vector(net->parameters()); };
  return (vector(a) - vector(b)).abs().max().item<double>();
}

void run(const Options& options, const lockstep::Context& context) {
  if (context.is_main())
    std::printf("%d batches of %d on each of %d ranks, %d steps\n", options.accumulate, options.batch_size,
                context.world_size(), options.steps);
  Training accumulated(context), at_once(context);
  auto generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<uint64_t>(context.rank()));
  for (int step = 0; step < options.steps; ++step) {
    const torch::Tensor data = torch::randn({options.accumulate * options.batch_size, 16}, generator);
    const torch::Tensor target = data.sum(1, /*keepdim=*/true).sin();
    accumulated.step(data, target, options, options.accumulate, context.is_main());
    at_once.step(data, target, options, 1, false);
  }
  const double apart = difference(accumulated.net, at_once.net);
  if (context.is_main())
    std::printf("one batch of %d on each rank instead: %s\n", options.accumulate * options.batch_size,
                apart < 1e-6 ? "the same weights to 1e-6" : "other weights");
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Accumulates gradients over several batches, clips them, and compares with one large batch."};
  app.add_option("--accumulate", options.accumulate, "Batches per step")->capture_default_str()->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Samples per batch on each rank")
      ->capture_default_str()
      ->check(at_least_one);
  app.add_option("--max-norm", options.max_norm, "Largest norm of all gradients together")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", options.steps, "Steps of the optimizer")->capture_default_str()->check(at_least_one);
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context;
    run(options, context);
    return 0;
  });
}
