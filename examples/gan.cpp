// Trains a small DCGAN on Fashion-MNIST: two models, each with its own optimizer and gradients.
//
//     lockstep run -n 2 -- build/bin/gan --epochs 2
//
// Each epoch ends with a line such as
//
//     epoch 2/2  discriminator loss 0.5120  generator loss 1.7034
//
// and the run with the number of reductions, which equals the number of steps for both models:
//
//     1874 steps; reductions of the discriminator's gradients 1874, of the generator's 1874
//
// Points to copy:
//
// - The generator's loss reaches the discriminator, whose gradients are not needed there. While Frozen lives, they are
//   neither computed nor sent. No refresh() is needed.
// - Images are generated once per step: the discriminator gets them detached, the generator's step continues with the
//   same graph. The discriminator sees real and generated images in one batch, so its step is one forward, one backward
//   and one reduction.
// - Batch norm in the generator is synchronised, so ranks train as one process with the whole batch would, up to
//   rounding; --double makes that visible.

#include <cstdio>
#include <fstream>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

namespace nn = torch::nn;

struct Options {
  std::string data = "/usr/share/datasets/fashion-mnist", json;
  int epochs = 2, batch_size = 32;
  int64_t steps = 0;  ///< of an epoch; 0: all
  bool use_double = false;
  uint64_t seed = 1;
};

constexpr int64_t kNoise = 64;

struct GeneratorImpl : nn::Module {
  /// noise [n, kNoise]; returns images [n, 1, 28, 28] from -1 to 1.
  torch::Tensor forward(const torch::Tensor& noise) {
    return drawing->forward(first(noise).view({noise.size(0), 64, 7, 7}));
  }
  nn::Linear first{register_module("first", nn::Linear(kNoise, 64 * 7 * 7))};
  nn::Sequential drawing{register_module(
      "drawing",
      nn::Sequential(nn::BatchNorm2d(64), nn::ReLU(),
                     nn::ConvTranspose2d(nn::ConvTranspose2dOptions(64, 32, 4).stride(2).padding(1).bias(false)),
                     nn::BatchNorm2d(32), nn::ReLU(),
                     nn::ConvTranspose2d(nn::ConvTranspose2dOptions(32, 1, 4).stride(2).padding(1)), nn::Tanh()))};
};
TORCH_MODULE(Generator);

struct DiscriminatorImpl : nn::Module {
  /// images [n, 1, 28, 28]; returns scores [n], large for real ones.
  torch::Tensor forward(const torch::Tensor& images) { return looking->forward(images).squeeze(1); }
  // Without batch norm, so that real and drawn images may share a batch.
  nn::Sequential looking{
      register_module("looking", nn::Sequential(nn::Conv2d(nn::Conv2dOptions(1, 32, 4).stride(2).padding(1)),
                                                nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                                                nn::Conv2d(nn::Conv2dOptions(32, 64, 4).stride(2).padding(1)),
                                                nn::LeakyReLU(nn::LeakyReLUOptions().negative_slope(0.2)),
                                                nn::Flatten(), nn::Linear(64 * 7 * 7, 1)))};
};
TORCH_MODULE(Discriminator);

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

torch::Tensor loss_towards(const torch::Tensor& scores, double real) {
  return nn::functional::binary_cross_entropy_with_logits(scores, torch::full_like(scores, real));
}

/// Initial weights as in DCGAN's paper.
template <typename Model>
Model initialised(Model model, torch::ScalarType dtype) {
  const torch::NoGradGuard no_grad;
  for (auto& item : model->named_parameters())
    if (item.value().dim() > 1) item.value().normal_(0, 0.02);
  model->to(dtype);
  return model;
}

torch::optim::AdamOptions adam() { return torch::optim::AdamOptions(2e-4).betas({0.5, 0.999}); }

class Training {
 public:
  Training(const Options& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        real_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTrain), context,
              {.batch_size = options.batch_size, .shuffle = true, .drop_last = true}),
        dtype_(options.use_double ? torch::kDouble : torch::kFloat),
        generator_(initialised(Generator(), dtype_)),
        discriminator_(initialised(Discriminator(), dtype_)),
        random_(at::make_generator<at::CPUGeneratorImpl>(options.seed)) {
    lockstep::convert_sync_batchnorm(*generator_, context.group());
    draw_.emplace(generator_, context, synchronised());
    judge_.emplace(discriminator_, context);
    draw_optimizer_.emplace((*draw_)->parameters(), adam());
    judge_optimizer_.emplace((*judge_)->parameters(), adam());
  }

  void run() {
    for (const int epoch : real_.epochs(options_.epochs)) {
      lockstep::Metrics metrics;
      auto& discriminator = metrics.add("discriminator", lockstep::Mean());
      auto& generator = metrics.add("generator", lockstep::Mean());
      int64_t steps = 0;
      for (auto& [images, labels] : real_) {
        if (options_.steps > 0 && steps++ >= options_.steps) break;
        // The data set is normalised; a generator that ends in tanh needs -1 to 1.
        const auto [judged, drawn] = step((images * 0.3530 + 0.2860) * 2 - 1);
        discriminator.update(judged, images.size(0));
        generator.update(drawn, images.size(0));
      }
      metrics.reduce(context_.group());
      losses_.push_back({discriminator.value(), generator.value()});
      if (context_.is_main())
        std::printf("epoch %d/%d  discriminator loss %.4f  generator loss %.4f\n", epoch + 1, options_.epochs,
                    discriminator.value(), generator.value());
      std::fflush(stdout);
    }
    report();
  }

 private:
  /// Its running statistics are equal on all ranks as they are.
  static lockstep::DistributedDataParallelOptions synchronised() {
    lockstep::DistributedDataParallelOptions options;
    options.buffers = lockstep::BufferPolicy::kNone;
    return options;
  }

  /// This rank's part of the whole world's noise, which does not depend on the number of ranks.
  torch::Tensor noise(int64_t rows) {
    return torch::randn({rows * context_.world_size(), kNoise}, random_, torch::TensorOptions(torch::kDouble))
        .narrow(0, context_.rank() * rows, rows)
        .to(dtype_);
  }

  /// Returns both losses.
  std::pair<torch::Tensor, torch::Tensor> step(const torch::Tensor& images) {
    const int64_t n = images.size(0);
    const torch::Tensor drawn = (*draw_)(noise(n));

    const torch::Tensor scores = (*judge_)(torch::cat({images.to(dtype_), drawn.detach()}));
    const torch::Tensor judged = loss_towards(scores.narrow(0, 0, n), 1) + loss_towards(scores.narrow(0, n, n), 0);
    judged.backward();
    judge_optimizer_->step();
    judge_optimizer_->zero_grad();

    const Frozen frozen(*discriminator_);
    const torch::Tensor fooled = loss_towards((*judge_)(drawn), 1);
    fooled.backward();
    draw_optimizer_->step();
    draw_optimizer_->zero_grad();
    ++steps_;
    return {judged.detach(), fooled.detach()};
  }

  void report() {
    if (!context_.is_main()) return;
    const int64_t judged = judge_->stats().reductions, drawn = draw_->stats().reductions;
    std::printf("%ld steps; reductions of the discriminator's gradients %ld, of the generator's %ld\n", steps_, judged,
                drawn);
    if (options_.json.empty()) return;
    const nlohmann::ordered_json figures{{"world_size", context_.world_size()},
                                         {"steps", steps_},
                                         {"discriminator_reductions", judged},
                                         {"generator_reductions", drawn},
                                         {"losses", losses_},
                                         {"generator", size_of(*generator_)},
                                         {"discriminator", size_of(*discriminator_)}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  static double size_of(const nn::Module& module) {
    return nn::utils::parameters_to_vector(module.parameters()).to(torch::kDouble).norm().item<double>();
  }

  const Options options_;
  lockstep::Context& context_;
  lockstep::DataLoader real_;
  const torch::ScalarType dtype_;
  Generator generator_;
  Discriminator discriminator_;
  at::Generator random_;
  std::optional<lockstep::DistributedDataParallel<Generator>> draw_;
  std::optional<lockstep::DistributedDataParallel<Discriminator>> judge_;
  std::optional<torch::optim::Adam> draw_optimizer_, judge_optimizer_;
  std::vector<std::vector<double>> losses_;  ///< of each epoch: the discriminator's and the generator's
  int64_t steps_ = 0;
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a small DCGAN on Fashion-MNIST, data-parallel on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--data", options.data, "Folder of the four IDX files, gzip or raw");
  app.add_option("--epochs", options.epochs, "Passes over the training images")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Images per batch on each rank")->check(at_least_one);
  app.add_option("--steps", options.steps, "Steps of an epoch; 0: all of its images")->check(CLI::NonNegativeNumber);
  app.add_flag("--double", options.use_double, "Compute in double, to compare numbers of ranks");
  app.add_option("--seed", options.seed, "Seed of initial weights, noise and shuffle");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context({.seed = options.seed});
    Training(options, context).run();
    return 0;
  });
}
