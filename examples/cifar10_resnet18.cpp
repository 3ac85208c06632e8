// Trains a ResNet-18 on CIFAR-10 with random crops and flips, batch norm over all ranks, and a learning rate that warms
// up and then falls along a cosine. The data is the binary version from https://www.cs.toronto.edu/~kriz/cifar.html:
//
//     lockstep run -n 2 -- build/bin/cifar10_resnet18 --data cifar-10-binary.tar.gz --folder runs/cifar10
//
// Each epoch ends with a line
//
//     epoch E/30  loss L  accuracy A  best so far
//
// (with the last words only if they are true) and the training with
//
//     best accuracy A in epoch E; checkpoints in runs/cifar10
//
// The same command resumes where it was stopped, even in the middle of an epoch and on a different number of ranks.

#include <cstdio>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

using lockstep::datasets::CIFAR10;

struct Options {
  std::string data;
  std::string folder;
  int epochs = 30;
  int batch_size = 64;
  double lr = 0.1;
  int width = 64;
  int patience = 0;
  bool bf16 = false;
  uint64_t seed = 1;
};

torch::nn::Conv2d convolution(int64_t in, int64_t out, int64_t size, int64_t stride) {
  return torch::nn::Conv2d(torch::nn::Conv2dOptions(in, out, size).stride(stride).padding(size / 2).bias(false));
}

/// Two convolutions, and a shortcut around them.
struct BlockImpl : torch::nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride)
      : body(convolution(in, out, 3, stride), torch::nn::BatchNorm2d(out), torch::nn::ReLU(),
             convolution(out, out, 3, 1), torch::nn::BatchNorm2d(out)) {
    register_module("body", body);
    if (in == out) return;
    around->push_back(convolution(in, out, 1, stride));
    around->push_back(torch::nn::BatchNorm2d(out));
    register_module("around", around);
  }
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::relu(body->forward(x) + (around->is_empty() ? x : around->forward(x)));
  }
  torch::nn::Sequential body, around;
};
TORCH_MODULE(Block);

/// With a first convolution for images of 32 x 32, as usual for CIFAR.
struct ResNet18Impl : torch::nn::Module {
  explicit ResNet18Impl(int64_t width)
      : layers(convolution(3, width, 3, 1), torch::nn::BatchNorm2d(width), torch::nn::ReLU()),
        classifier(8 * width, 10) {
    for (int64_t stage = 0; stage < 4; ++stage) {
      const int64_t out = width << stage;
      layers->push_back(Block(stage == 0 ? width : out / 2, out, stage == 0 ? 1 : 2));
      layers->push_back(Block(out, out, 1));
    }
    register_module("layers", layers);
    register_module("classifier", classifier);
  }
  /// images [n, 3, 32, 32]; returns scores [n, 10].
  torch::Tensor forward(const torch::Tensor& images) {
    return classifier(layers->forward(images).mean(at::IntArrayRef{2, 3}));
  }
  torch::nn::Sequential layers;
  torch::nn::Linear classifier;
};
TORCH_MODULE(ResNet18);

lockstep::DataLoader training_data(const Options& options, const lockstep::Context& context) {
  using namespace lockstep::transforms;
  return {lockstep::Transformed(CIFAR10(options.data, lockstep::kTrain, {.as_bytes = true}),
                                {RandomCrop(32, {.padding = 4}), RandomHorizontalFlip(),
                                 Normalize(CIFAR10::kMean, CIFAR10::kStandardDeviation)}),
          context,
          {.batch_size = options.batch_size, .shuffle = true, .drop_last = true}};
}

lockstep::TrainerOptions trainer_options(const Options& options) {
  return {.epochs = options.epochs,
          .precision = options.bf16 ? lockstep::Precision::kBFloat16 : lockstep::Precision::kFloat,
          .schedule =
              [](int64_t steps) {
                const int64_t rising = std::max<int64_t>(1, steps / 10);
                return lockstep::warm_up(rising, lockstep::cosine_annealing_lr(std::max<int64_t>(1, steps - rising)));
              },
          .score = "accuracy",
          .patience = options.patience,
          .folder = options.folder};
}

void run(const Options& options, const lockstep::Context& context) {
  lockstep::DataLoader train = training_data(options, context);
  lockstep::DataLoader test(CIFAR10(options.data, lockstep::kTest), context, {.batch_size = 500, .exactly_once = true});

  ResNet18 net(options.width);
  net->to(lockstep::device());
  lockstep::convert_sync_batchnorm(*net, context.group());
  torch::optim::SGD optimizer(net->parameters(),
                              torch::optim::SGDOptions(options.lr).momentum(0.9).weight_decay(5e-4).nesterov(true));

  lockstep::Trainer trainer(net.ptr(), optimizer, context, trainer_options(options));
  lockstep::Metrics metrics;
  auto& accuracy = metrics.add("accuracy", lockstep::Accuracy());
  trainer.evaluate_on(test, metrics, [&](auto& batch) { accuracy.update(net(batch.data), batch.target); });
  trainer.on_epoch([&](const lockstep::EpochResult& epoch) {
    if (!context.is_main()) return;
    std::printf("epoch %d/%d  loss %.4f  accuracy %.4f%s\n", epoch.epoch + 1, options.epochs, epoch.loss,
                accuracy.value(), epoch.is_best ? "  best so far" : "");
    std::fflush(stdout);
  });
  const lockstep::TrainerResult result = trainer.fit(
      train, [&](auto& batch) { return torch::nn::functional::cross_entropy(net(batch.data), batch.target); });

  if (!context.is_main()) return;
  if (!result.stopped_early.empty()) std::printf("stopped early: %s\n", result.stopped_early.c_str());
  std::printf("best accuracy %.4f in epoch %d; checkpoints in %s\n", result.best_score, result.best_epoch + 1,
              options.folder.c_str());
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Trains a ResNet-18 on CIFAR-10, data-parallel on all ranks of the launcher."};
  app.add_option("--data", options.data, "cifar-10-binary.tar.gz, or the folder in it")->required();
  app.add_option("--folder", options.folder, "Folder of the checkpoints; resumes from those in it")->required();
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->capture_default_str()
      ->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Images per batch on each rank")
      ->capture_default_str()
      ->check(at_least_one);
  app.add_option("--lr", options.lr, "Peak learning rate")->capture_default_str()->check(CLI::PositiveNumber);
  app.add_option("--width", options.width, "Channels of the first stage")->capture_default_str()->check(at_least_one);
  app.add_option("--patience", options.patience, "Stop after this many epochs without a better accuracy; 0: never")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_flag("--bf16", options.bf16, "Compute in bfloat16 where that is enough");
  app.add_option("--seed", options.seed, "Seed of weights, order, crops and flips")->capture_default_str();
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context({.seed = options.seed});
    run(options, context);
    return 0;
  });
}
