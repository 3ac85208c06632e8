// Trains a Wasserstein GAN with gradient penalty (Gulrajani et al., 2017) on pictures of rings: two models and three
// backwards, and a reduction only where an optimizer makes a step.
//
//     lockstep run -n 2 -- build/bin/gradient_penalty
//
// Every hundred steps print a line such as
//
//     step 200/800  distance 14.111  penalty 0.2313
//
// and the run ends with the number of reductions, which is that of the optimizers' steps:
//
//     600 steps of the critic, 200 of the generator; reductions 600 and 200
//
// Points to copy:
//
// - The critic's two backwards are an accumulation of two passes, so the first one sends nothing.
// - The penalty takes the gradient of the scores with respect to the images, with create_graph. Its own backward is an
//   ordinary one.
// - The generator's loss goes through the critic, whose gradients are not needed there: while Frozen lives, they are
//   neither computed nor sent. No refresh() is needed.
// - Noise is part of a sample, drawn from the sample's seed. So it does not depend on the number of ranks, and --double
//   shows that they train as one process does. Steps of the two models alternate, each with whole batches.

#include <cstdio>
#include <fstream>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  int steps = 800, batch_size = 48;
  double penalty = 10;
  bool use_double = false;
  uint64_t seed = 1;
  std::string json;
};

constexpr int64_t kSide = 16, kNoise = 16;

/// Pictures of rings, drawn anew in each epoch, with what a step draws for each.
struct Rings {
  int64_t size() const { return 4800; }
  /// A picture [1, kSide, kSide] from -1 to 1, noise [kNoise], and a place between real and generated, from 0 to 1.
  std::tuple<torch::Tensor, torch::Tensor, double> get(int64_t, uint64_t seed) const {
    lockstep::transforms::Random random(seed);
    const double x = 6 + 4 * random.uniform(), y = 6 + 4 * random.uniform(), radius = 2.5 + 2 * random.uniform();
    const torch::Tensor line = torch::arange(kSide, torch::kDouble);
    const torch::Tensor away = ((line - x).square() + (line - y).square().unsqueeze(1)).sqrt() - radius;
    const torch::Tensor noise = torch::empty({kNoise}, torch::kDouble);
    for (int64_t i = 0; i < kNoise; ++i) noise[i] = 2 * random.uniform() - 1;
    return {2 * (-away.square()).exp().unsqueeze(0) - 1, noise, random.uniform()};
  }
};

nn::ConvTranspose2d wider(int64_t from, int64_t to) {
  return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(from, to, 4).stride(2).padding(1));
}
nn::Conv2d narrower(int64_t from, int64_t to) {
  return nn::Conv2d(nn::Conv2dOptions(from, to, 4).stride(2).padding(1));
}
nn::LeakyReLU leaky() { return nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)); }

/// Noise [n, kNoise] becomes images [n, 1, kSide, kSide].
nn::Sequential make_generator() {
  return nn::Sequential(nn::Linear(kNoise, 32 * 16), nn::ReLU(),
                        nn::Unflatten(nn::UnflattenOptions(1, {32, kSide / 4, kSide / 4})), wider(32, 16), nn::ReLU(),
                        wider(16, 1), nn::Tanh());
}
/// Images become scores [n, 1]. Without batch norm: the penalty is that of each image by itself.
nn::Sequential make_critic() {
  return nn::Sequential(narrower(1, 16), leaky(), narrower(16, 32), leaky(), nn::Flatten(), nn::Linear(32 * 16, 1));
}

/// As long as it lives, backward computes no gradients of the module's parameters, so nothing is reduced.
class Frozen {
 public:
  explicit Frozen(nn::Module& module) : parameters_(module.parameters()) { set(false); }
  ~Frozen() { set(true); }
  Frozen(const Frozen&) = delete;

 private:
  void set(bool trains) {
    for (torch::Tensor& parameter : parameters_) parameter.requires_grad_(trains);
  }
  std::vector<torch::Tensor> parameters_;
};

class Training {
 public:
  Training(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        rings_(Rings(), context,
               {.batch_size = options.batch_size, .split_batches = true, .shuffle = true, .drop_last = true}) {
    generator_->to(dtype_);
    critic_->to(dtype_);
    draw_.emplace(generator_, context);
    judge_.emplace(critic_, context);
    const auto adam = torch::optim::AdamOptions(1e-3).betas({0.5, 0.9});
    draw_optimizer_.emplace(generator_->parameters(), adam);
    judge_optimizer_.emplace(critic_->parameters(), adam);
  }

  void run() {
    lockstep::Metrics metrics;
    auto& distance = metrics.add("distance", lockstep::Mean());
    auto& penalty = metrics.add("penalty", lockstep::Mean());
    for (int step = 0; step < options_.steps;) {
      for (auto& [images, noise, mix] : rings_) {
        const bool draws = step % 4 == 3;  // three steps of the critic, one of the generator
        if (draws) {
          draw(noise.to(dtype_));
        } else {
          const auto [apart, slope] = judge(images.to(dtype_), noise.to(dtype_), mix.to(dtype_));
          distance.update(apart, images.size(0));
          penalty.update(slope, images.size(0));
        }
        if (!(draws ? *draw_ : *judge_).step_complete()) continue;  // with virtual ranks: others are still to come
        auto& optimizer = draws ? *draw_optimizer_ : *judge_optimizer_;
        optimizer.step();
        optimizer.zero_grad();
        if (++step % 100 == 0 || step == options_.steps) {
          metrics.reduce(context_.group());
          figures_.push_back({distance.value(), penalty.value()});
          if (context_.is_main())
            std::printf("step %d/%d  distance %.3f  penalty %.4f\n", step, options_.steps, distance.value(),
                        penalty.value());
          std::fflush(stdout);
        }
        if (step == options_.steps) break;
      }
    }
    report();
  }

 private:
  /// Two backwards of the critic. Returns how far apart it sees real and generated images, and the penalty.
  std::pair<torch::Tensor, torch::Tensor> judge(const torch::Tensor& real, const torch::Tensor& noise,
                                                const torch::Tensor& mix) {
    const auto both = judge_->accumulate(2);
    torch::Tensor drawn;
    {
      const torch::NoGradGuard no_grad;
      drawn = (*draw_)(noise);
    }
    const torch::Tensor apart = (*judge_)(real).mean() - (*judge_)(drawn).mean();
    (-apart).backward();

    const torch::Tensor between = drawn.lerp(real, mix.view({-1, 1, 1, 1})).requires_grad_();
    const torch::Tensor scores = (*judge_)(between);
    const torch::Tensor slope = torch::autograd::grad({scores.sum()}, {between}, {}, true, true)[0];
    const torch::Tensor penalty = (slope.flatten(1).norm(2, 1) - 1).square().mean();
    (options_.penalty * penalty).backward();
    return {apart.detach(), penalty.detach()};
  }

  void draw(const torch::Tensor& noise) {
    const Frozen frozen(*critic_);
    (-(*judge_)((*draw_)(noise)).mean()).backward();
  }

  void report() {
    if (!context_.is_main()) return;
    const int64_t judged = judge_->stats().reductions, drawn = draw_->stats().reductions;
    std::printf("%d steps of the critic, %d of the generator; reductions %ld and %ld\n",
                options_.steps - options_.steps / 4, options_.steps / 4, judged, drawn);
    if (options_.json.empty()) return;
    std::vector<double> norms;
    for (const auto& module : {generator_, critic_})
      for (const torch::Tensor& parameter : module->parameters()) norms.push_back(parameter.norm().item<double>());
    const std::vector<std::string> hashes{lockstep::hash(lockstep::state_dict(*generator_)),
                                          lockstep::hash(lockstep::state_dict(*critic_))};
    const nlohmann::ordered_json figures{{"losses", figures_}, {"weights", norms}, {"hash", hashes}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options& options_;
  lockstep::Context& context_;
  const torch::ScalarType dtype_;
  lockstep::ExampleLoader<lockstep::CollatedOf<Rings>> rings_;
  nn::Sequential generator_ = make_generator(), critic_ = make_critic();
  std::optional<lockstep::DistributedDataParallel<nn::Sequential>> draw_, judge_;
  std::optional<torch::optim::Adam> draw_optimizer_, judge_optimizer_;
  std::vector<std::vector<double>> figures_;  ///< distances and penalties
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a GAN with gradient penalty on pictures of rings, on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--steps", options.steps, "Steps of both models together")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Pictures of a step, on all ranks together")->check(at_least_one);
  app.add_option("--penalty", options.penalty, "Weight of the gradient penalty")->check(CLI::NonNegativeNumber);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of weights, pictures and noise");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Training(options, context).run();
    return 0;
  });
}
