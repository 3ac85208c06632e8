// Trains a small convolutional network on Fashion-MNIST, on as many ranks as the launcher starts:
//
//     lockstep run -n 2 -- build/bin/train_fashion_mnist --epochs 4
//
// Each epoch ends with a line such as
//
//     epoch 4/4  train loss 0.1866  test accuracy 0.9207 (9207 of 10000)
//
// and leaves RUN_DIR/checkpoint.safetensors. --resume RUN_DIR goes on from there and ends with the same bits as a run
// that was never stopped. `lockstep report RUN_DIR` draws what happened; --json FILE writes the figures of the run.

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

struct Options {
  int epochs = 4, batch_size = 64;
  double lr = 0.1;
  uint64_t seed = 42;
  std::string data = "/usr/share/datasets/fashion-mnist", run_dir, resume, json, backend;
};

struct NetImpl : torch::nn::Module {
  /// images [n, 1, 28, 28]; returns scores [n, 10].
  torch::Tensor forward(const torch::Tensor& images) {
    return classifier->forward(features->forward(images).flatten(1));
  }

  torch::nn::Sequential features{register_module(
      "features", torch::nn::Sequential(torch::nn::Conv2d(torch::nn::Conv2dOptions(1, 16, 3).padding(1).bias(false)),
                                        torch::nn::BatchNorm2d(16), torch::nn::ReLU(), torch::nn::MaxPool2d(2),
                                        torch::nn::Conv2d(torch::nn::Conv2dOptions(16, 32, 3).padding(1).bias(false)),
                                        torch::nn::BatchNorm2d(32), torch::nn::ReLU(), torch::nn::MaxPool2d(2)))};
  torch::nn::Sequential classifier{register_module(
      "classifier",
      torch::nn::Sequential(torch::nn::Linear(32 * 7 * 7, 128), torch::nn::ReLU(), torch::nn::Linear(128, 10)))};
};
TORCH_MODULE(Net);

class Training {
 public:
  Training(const Options& options, const lockstep::Context& context)
      : options_(options),
        context_(context),
        train_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTrain), context,
               {.batch_size = options.batch_size, .shuffle = true, .drop_last = true}),
        test_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTest), context,
              {.batch_size = 500, .exactly_once = true}),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9).weight_decay(5e-4)) {
    // Checked now, so that a mistyped name does not cost a training. An old file stays until there are new figures.
    if (context.is_main() && !options.json.empty() && !std::ofstream(options.json, std::ios::app))
      throw lockstep::Error("the figures cannot be written to " + options.json + "; choose another --json");
    if (test_.dataset_size() == 0) throw lockstep::Error("there are no test images in " + options.data);
    if (!options.resume.empty()) resume();
    if (losses_.size() >= static_cast<size_t>(options.epochs))
      throw lockstep::Error(c10::str("nothing is left to train: ", options.resume, " has done ", losses_.size(),
                                     " epochs of --epochs ", options.epochs, "; raise --epochs"));
  }

  void run() {
    const int first_epoch = static_cast<int>(losses_.size());
    lockstep::DistributedDataParallel model(net_, context_);
    lockstep::RunLog log(context_, {.folder = options_.run_dir, .first_step = first_epoch * train_.size()});
    log.watch(model);
    train_.set_epoch(first_epoch);
    for (const int epoch : train_.epochs(options_.epochs)) {
      train_epoch(model, log, epoch);
      lockstep::evaluate(*net_, test_, context_.group(), metrics_, [&](auto& batch) {
        const torch::Tensor scores = net_(batch.data);
        accuracy_.update(scores, batch.target);
        loss_.update(torch::nn::functional::cross_entropy(scores, batch.target), batch.target.size(0));
      });
      for (const auto& [name, value] : metrics_.values()) log.scalar("test/" + name, value);
      if (!context_.is_main()) continue;
      save(log.folder() + "/checkpoint.safetensors");
      std::printf("epoch %d/%d  train loss %.4f  test accuracy %.4f (%ld of %ld)\n", epoch + 1, options_.epochs,
                  losses_.back(), accuracy_.value(), accuracy_.correct(), accuracy_.count());
      std::fflush(stdout);
    }
    if (context_.is_main()) report(model, options_.epochs - first_epoch, log.folder());
  }

 private:
  using Model = lockstep::DistributedDataParallel<Net>;

  void train_epoch(Model& model, lockstep::RunLog& log, int epoch) {
    const int64_t steps = options_.epochs * train_.size(), rising = (steps + 9) / 10;
    const auto schedule =
        lockstep::warm_up(rising, lockstep::cosine_annealing_lr(std::max<int64_t>(1, steps - rising)));
    const auto start = std::chrono::steady_clock::now();
    lockstep::Metrics metrics;
    auto& mean = metrics.add("loss", lockstep::Mean());
    log.epoch(epoch);
    auto bar = lockstep::progress(train_);
    for (auto& [data, target] : bar) {
      const double lr = schedule.rate(options_.lr, log.steps());
      for (auto& group : optimizer_.param_groups()) group.options().set_lr(lr);
      optimizer_.zero_grad();
      const torch::Tensor scores = model(data);
      const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, target);
      loss.backward();  // gradients are averaged over the ranks while this runs
      optimizer_.step();

      mean.update(loss, data.size(0));
      bar.loss(loss.item<double>());
      bar.communication(model.communication_seconds());
      const double right = scores.argmax(1).eq(target).to(torch::kDouble).mean().item<double>();
      log.step(data.size(0), {{"train/loss", loss.item<double>()}, {"train/accuracy", right}, {"learning_rate", lr}});
    }
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    metrics.reduce(context_.group());
    losses_.push_back(mean.value());
  }

  void save(const std::string& path) const {
    lockstep::Checkpoint checkpoint;
    checkpoint.tensors.update(lockstep::with_prefix("model.", lockstep::state_dict(*net_)));
    checkpoint.tensors.update(lockstep::with_prefix("optimizer.", lockstep::state_dict(optimizer_)));
    checkpoint.metadata["epochs_done"] = std::to_string(losses_.size());
    checkpoint.metadata["train_loss"] = nlohmann::json(losses_).dump();
    lockstep::save(checkpoint, path);
  }

  void resume() {
    const bool is_folder = std::filesystem::is_directory(options_.resume);
    const std::string path = options_.resume + (is_folder ? "/checkpoint.safetensors" : "");
    lockstep::Checkpoint checkpoint = lockstep::load(path);
    try {
      lockstep::load_state_dict(*net_, lockstep::without_prefix("model.", checkpoint.tensors));
      lockstep::load_state_dict(optimizer_, lockstep::without_prefix("optimizer.", checkpoint.tensors));
      const auto losses = nlohmann::json::parse(checkpoint.metadata["train_loss"], nullptr, /*allow_exceptions=*/false);
      if (!losses.is_array() || checkpoint.metadata["epochs_done"] != std::to_string(losses.size()))
        throw lockstep::Error("it is no checkpoint of this program: its metadata lacks epochs_done or train_loss");
      losses_ = losses.get<std::vector<double>>();
    } catch (const std::exception& error) {
      throw lockstep::Error("cannot resume from " + path + ": " + error.what());
    }
  }

  void report(const Model& model, int epochs, const std::string& folder) {
    const double rate = static_cast<double>(epochs * train_.samples() * context_.world_size()) / seconds_;
    const double share = model.communication_seconds() / seconds_;
    const std::string hash = lockstep::hash(lockstep::state_dict(*net_));
    std::printf(
        "%d %s, %d epochs in %.1f s: %.0f samples/s, %.0f %% of the time in communication\n"
        "test accuracy %.4f, parameters %s, checkpoint in %s/checkpoint.safetensors\n",
        context_.world_size(), context_.world_size() == 1 ? "rank" : "ranks", epochs, seconds_, rate, 100 * share,
        accuracy_.value(), hash.c_str(), folder.c_str());
    if (options_.json.empty()) return;
    const nlohmann::ordered_json figures = {{"world_size", context_.world_size()},
                                            {"test_accuracy", accuracy_.value()},
                                            {"test_samples", accuracy_.count()},
                                            {"train_loss", losses_},
                                            {"samples_per_second", rate},
                                            {"communication_share", share},
                                            {"parameters_hash", hash}};
    if (!(std::ofstream(options_.json) << figures.dump(2) << '\n'))
      throw lockstep::Error("the figures cannot be written to " + options_.json + "; choose another --json");
  }

  const Options options_;
  const lockstep::Context& context_;
  lockstep::DataLoader train_, test_;
  Net net_;
  torch::optim::SGD optimizer_;
  lockstep::Metrics metrics_;
  lockstep::Mean& loss_ = metrics_.add("loss", lockstep::Mean());
  lockstep::Accuracy& accuracy_ = metrics_.add("accuracy", lockstep::Accuracy());
  std::vector<double> losses_;  ///< the mean of each epoch that is done, over all ranks
  double seconds_ = 0;          ///< of training, without evaluation
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a small convolutional network on Fashion-MNIST, data-parallel on all ranks of the launcher."};
  app.option_defaults()->always_capture_default();
  const CLI::Range at_least_one(1, std::numeric_limits<int>::max());
  app.add_option("--epochs", options.epochs, "Passes over the training images")->check(at_least_one);
  app.add_option("--batch-size", options.batch_size, "Images per batch on each rank")->check(at_least_one);
  app.add_option("--lr", options.lr, "Peak learning rate");
  app.add_option("--seed", options.seed, "Seed of initial weights and shuffle");
  app.add_option("--data", options.data, "Folder of the four IDX files, gzip or raw");
  app.add_option("--run-dir", options.run_dir,
                 "Folder of the checkpoint (else the launcher's, or runs/train_fashion_mnist)");
  app.add_option("--resume", options.resume, "Checkpoint, or the run folder that holds it, to resume from");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.add_option("--backend", options.backend, "Engine of the collectives (docs/backends.md; else the best that fits)");
  app.footer(lockstep::kRanksHelp);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    const lockstep::Context context({.seed = options.seed, .backend = options.backend});
    Training(options, context).run();
    return 0;
  });
}
