// Averages weights while it trains, saves checkpoints, is stopped, and resumes as if it had never stopped.
//
//     lockstep run -n 2 -- build/bin/ema_checkpoint_resume --folder ema --stop-after 25
//
// prints
//
//     starts anew
//     stopped after step 25 of 60, in epoch 2
//
// and then
//
//     lockstep run -n 2 -- build/bin/ema_checkpoint_resume --folder ema
//
// prints
//
//     goes on after step 25, in epoch 2
//     step 60: error of the weights 0.55, of their average 0.22
//
// It leaves ema/average.pt, which Python's torch.load reads, and ema/average.safetensors.

#include <cstdio>
#include <filesystem>
#include <limits>
#include <string>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>

namespace {

struct Options {
  std::string folder;
  int epochs = 4;
  int stop_after = 0;
};

/// 240 noisy values of a linear function of 8 numbers.
class NoisyLine : public lockstep::Dataset {
 public:
  NoisyLine() {
    auto generator = at::make_generator<at::CPUGeneratorImpl>(5);
    data_ = torch::randn({240, 8}, generator);
    target_ = exact(data_) + torch::randn({240, 1}, generator);
  }
  static torch::Tensor exact(const torch::Tensor& data) { return data.matmul(torch::arange(1, 9).view({8, 1}) / 8.0); }
  int64_t size() const override { return data_.size(0); }
  lockstep::Batch get(at::ArrayRef<int64_t> indices) const override {
    const torch::Tensor chosen = torch::tensor(indices, torch::kLong);
    return {data_.index_select(0, chosen), target_.index_select(0, chosen)};
  }

 private:
  torch::Tensor data_, target_;
};

/// How far the module is from the function without noise.
double error_of(torch::nn::Linear& net) {
  torch::NoGradGuard no_grad;
  const torch::Tensor points = torch::eye(8);
  return (net(points) - NoisyLine::exact(points)).norm().item<double>();
}

void run(const Options& options, const lockstep::Context& context) {
  lockstep::DataLoader train(NoisyLine(), context, {.batch_size = 8, .shuffle = true});
  torch::nn::Linear net(8, 1);
  lockstep::DistributedDataParallel model(net, context);
  torch::optim::SGD optimizer(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.5));
  lockstep::Ema ema(*net, {.decays = {0.95}, .warm_up = true});

  lockstep::Checkpointer checkpointer(options.folder, context.group(), {.every_steps = 10});
  checkpointer.add("model", model).add("optimizer", optimizer).add("ema", ema).add("loader", train);
  const bool resumed = checkpointer.resume();
  int64_t step = checkpointer.resumed_step();
  if (context.is_main()) {
    if (resumed)
      std::printf("goes on after step %ld, in epoch %d\n", step, train.epoch() + 1);
    else
      std::printf("starts anew\n");
  }

  for (const int epoch : train.epochs(options.epochs)) {
    for (auto& [data, target] : train) {
      optimizer.zero_grad();
      torch::mse_loss(model(data), target).backward();
      optimizer.step();
      ema.update();
      checkpointer.step(++step);
      if (step != options.stop_after) continue;
      checkpointer.save(step);  // if it were killed, it would resume from step 20
      checkpointer.finish();
      if (context.is_main())
        std::printf("stopped after step %ld of %ld, in epoch %d\n", step, options.epochs * train.size(), epoch + 1);
      return;
    }
  }
  checkpointer.save(step);
  checkpointer.finish();

  const double own = error_of(net);
  const auto averaged = ema.averaged_weights();  // net holds them while this lives
  lockstep::rank_zero_only(context.group(), [&] {
    std::printf("step %ld: error of the weights %.2f, of their average %.2f\n", step, own, error_of(net));
    lockstep::save(lockstep::state_dict(*net), options.folder + "/average.pt");
    lockstep::save(lockstep::state_dict(*net), options.folder + "/average.safetensors");
  });
}

}  // namespace

int main(int argc, char** argv) {
  Options options;
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  CLI::App app{"Trains with averaged weights and checkpoints; goes on where an earlier run in the folder stopped."};
  app.add_option("--folder", options.folder, "Folder of the checkpoints; empty or new for a new run")->required();
  app.add_option("--epochs", options.epochs, "Passes over the data, in all")
      ->capture_default_str()
      ->check(at_least_one);
  app.add_option("--stop-after", options.stop_after, "Step after which to stop (default: when all is done)")
      ->check(at_least_one);
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context({.seed = 3});
    run(options, context);
    return 0;
  });
}
