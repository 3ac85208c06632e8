// Trains a small convolutional network on Fashion-MNIST, on as many ranks as the launcher starts:
//
//     lockstep run -n 2 -- build/bin/train_fashion_mnist --epochs 4
//
// Each epoch ends with a line such as
//
//     epoch 4/4  train loss 0.1866  test accuracy 0.9207 (9207 of 10000)
//
// and leaves RUN_DIR/checkpoint.safetensors; --resume RUN_DIR goes on from there and ends with the same bits as a run
// that was never stopped. `lockstep report RUN_DIR` draws what happened; --json FILE writes the figures of the run.

#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <numbers>

#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

namespace {

struct Options {
  int epochs = 4;
  int batch_size = 64;
  double lr = 0.1;
  uint64_t seed = 42;
  std::string data = "/usr/share/datasets/fashion-mnist";
  std::string run_dir;
  std::string resume;
  std::string json;
  std::string backend;
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

/// Rises linearly over the first tenth of the steps, then falls along half a cosine to zero.
double learning_rate(double peak, int64_t step, int64_t steps) {
  const double warm_up = std::max(1.0, 0.1 * static_cast<double>(steps));
  const double done = static_cast<double>(step);
  if (done < warm_up) return peak * (done + 1) / warm_up;
  const double progress = (done - warm_up) / (static_cast<double>(steps) - warm_up);
  return peak * 0.5 * (1 + std::cos(std::numbers::pi * progress));
}

/// What the training has come to; the part of a checkpoint that is no tensor.
struct History {
  int epochs_done = 0;
  std::vector<double> train_loss;  ///< mean over all samples of an epoch
};

struct Evaluation {
  int64_t correct;
  int64_t samples;
  double loss;  ///< mean over the samples
};

/// Share of the samples whose highest score is the target's. scores [n, classes], target [n].
double accuracy_of(const torch::Tensor& scores, const torch::Tensor& target) {
  return scores.argmax(1).eq(target).sum().item<double>() / static_cast<double>(target.size(0));
}

class Training {
 public:
  explicit Training(const Options& options, const lockstep::Context& context)
      : options_(options),
        context_(context),
        run_dir_(writable_run_dir(options, context)),
        train_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTrain), context,
               {.batch_size = options.batch_size, .shuffle = true, .drop_last = true}),
        test_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTest), context,
              {.batch_size = 500, .exactly_once = true}),
        optimizer_(net_->parameters(), torch::optim::SGDOptions(options.lr).momentum(0.9).weight_decay(5e-4)) {
    if (context.is_main() && !options.json.empty() && !can_write(options.json))
      throw lockstep::Error("the figures cannot be written to " + options.json +
                            "; choose another --json, in a folder that is there");
    if (test_.dataset_size() == 0) throw lockstep::Error("there are no test images in " + options.data);
    if (!options.resume.empty()) resume();
    if (history_.epochs_done >= options.epochs)
      throw lockstep::Error("nothing is left to train: " + options.resume + " has done " +
                            std::to_string(history_.epochs_done) + " epochs of --epochs " +
                            std::to_string(options.epochs) + "; raise --epochs");
  }

  void run() {
    lockstep::DistributedDataParallel model(net_, context_);
    first_epoch_ = history_.epochs_done;
    lockstep::RunLog log(context_, {.folder = run_dir_, .first_step = first_epoch_ * train_.size()});
    log.watch(model);
    train_.set_epoch(first_epoch_);
    for (int epoch : train_.epochs(options_.epochs)) {
      train_epoch(model, log, epoch);
      accuracy_ = evaluate();
      log.scalar("test/loss", accuracy_.loss);
      log.scalar("test/accuracy", accuracy());
      save_checkpoint();
      if (context_.is_main())
        std::printf("epoch %d/%d  train loss %.4f  test accuracy %.4f (%ld of %ld)\n", epoch + 1, options_.epochs,
                    history_.train_loss.back(), accuracy(), accuracy_.correct, accuracy_.samples);
      std::fflush(stdout);
    }
    report(model);
  }

 private:
  using Model = lockstep::DistributedDataParallel<Net>;

  static std::filesystem::path writable_run_dir(const Options& options, const lockstep::Context& context) {
    std::filesystem::path folder = options.run_dir;
    if (folder.empty()) folder = context.run_dir().empty() ? "runs/train_fashion_mnist" : context.run_dir();
    std::error_code ignored;
    std::filesystem::create_directories(folder, ignored);
    if (!can_write(folder / (".probe-" + std::to_string(context.rank()))))
      throw lockstep::Error("the run folder " + folder.string() + " cannot be written; choose another --run-dir");
    return folder;
  }

  /// Whether a file could be written there. An existing file stays as it is.
  static bool can_write(const std::filesystem::path& file) {
    std::error_code ignored;
    const bool existed = std::filesystem::exists(file, ignored);
    const bool opened = std::ofstream(file, std::ios::app).is_open();
    if (!existed) std::filesystem::remove(file, ignored);
    return opened;
  }

  void train_epoch(Model& model, lockstep::RunLog& log, int epoch) {
    const auto start = std::chrono::steady_clock::now();
    net_->train();
    int64_t step = epoch * train_.size();
    double loss_sum = 0;
    log.epoch(epoch);
    auto bar = lockstep::progress(train_);
    for (auto& [data, target] : bar) {
      const double lr = learning_rate(options_.lr, step++, options_.epochs * train_.size());
      set_learning_rate(lr);
      optimizer_.zero_grad();
      const torch::Tensor scores = model(data);
      const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, target);
      loss.backward();  // gradients are averaged over the ranks while this runs
      optimizer_.step();
      loss_sum += loss.item<double>();
      bar.loss(loss.item<double>());
      bar.communication(model.communication_seconds());
      log.step(data.size(0), {{"train/loss", loss.item<double>()},
                              {"train/accuracy", accuracy_of(scores, target)},
                              {"learning_rate", lr}});
    }
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    // Every batch is full, so the mean over batches and ranks is the mean over samples.
    torch::Tensor mean = torch::tensor(loss_sum / static_cast<double>(train_.size()), torch::kDouble);
    context_.group().all_reduce(mean, lockstep::ReduceOp::kMean);
    history_.train_loss.push_back(mean.item<double>());
    history_.epochs_done = epoch + 1;
  }

  Evaluation evaluate() {
    lockstep::Metrics metrics;
    auto& accuracy = metrics.add("accuracy", lockstep::Accuracy());
    auto& loss = metrics.add("loss", lockstep::Mean());
    lockstep::evaluate(*net_, test_, context_.group(), metrics, [&](lockstep::Batch& batch) {
      const torch::Tensor scores = net_(batch.data);
      accuracy.update(scores, batch.target);
      loss.update(torch::nn::functional::cross_entropy(scores, batch.target), batch.target.size(0));
    });
    return {accuracy.correct(), accuracy.count(), loss.value()};
  }

  double accuracy() const { return static_cast<double>(accuracy_.correct) / static_cast<double>(accuracy_.samples); }

  void set_learning_rate(double value) {
    for (auto& group : optimizer_.param_groups()) group.options().set_lr(value);
  }

  void save_checkpoint() {
    if (!context_.is_main()) return;
    lockstep::Checkpoint checkpoint;
    checkpoint.tensors.update(lockstep::with_prefix("model.", lockstep::state_dict(*net_)));
    checkpoint.tensors.update(lockstep::with_prefix("optimizer.", lockstep::state_dict(optimizer_)));
    checkpoint.metadata["epochs_done"] = std::to_string(history_.epochs_done);
    checkpoint.metadata["train_loss"] = nlohmann::json(history_.train_loss).dump();
    lockstep::save(checkpoint, run_dir_ / "checkpoint.safetensors");
  }

  void resume() {
    std::filesystem::path file = options_.resume;
    if (std::filesystem::is_directory(file)) file /= "checkpoint.safetensors";
    const lockstep::Checkpoint checkpoint = lockstep::load(file);
    try {
      lockstep::load_state_dict(*net_, lockstep::without_prefix("model.", checkpoint.tensors));
      lockstep::load_state_dict(optimizer_, lockstep::without_prefix("optimizer.", checkpoint.tensors));
      history_.epochs_done = std::stoi(checkpoint.metadata.at("epochs_done"));
      history_.train_loss = nlohmann::json::parse(checkpoint.metadata.at("train_loss")).get<std::vector<double>>();
    } catch (const lockstep::Error& error) {
      throw lockstep::Error("cannot resume from " + file.string() + ": " + error.what());
    } catch (const std::exception&) {
      history_ = {};
    }
    if (history_.epochs_done < 1 || history_.train_loss.size() != static_cast<size_t>(history_.epochs_done))
      throw lockstep::Error("cannot resume from " + file.string() +
                            ": it is no checkpoint of this program, for its metadata lacks epochs_done or train_loss");
  }

  void report(const Model& model) {
    const double share = model.communication_seconds() / seconds_;
    const double trained = static_cast<double>(train_.size() * options_.batch_size * context_.world_size()) *
                           static_cast<double>(epochs_trained());
    if (!context_.is_main()) return;
    const std::string hash = lockstep::hash(lockstep::state_dict(*net_));
    std::printf(
        "%d %s, %d epochs in %.1f s: %.0f samples/s, %.0f %% of the time in communication\n"
        "test accuracy %.4f, parameters %s, checkpoint in %s\n",
        context_.world_size(), context_.world_size() == 1 ? "rank" : "ranks", epochs_trained(), seconds_,
        trained / seconds_, 100 * share, accuracy(), hash.c_str(), (run_dir_ / "checkpoint.safetensors").c_str());
    if (options_.json.empty()) return;
    const nlohmann::ordered_json json = {{"world_size", context_.world_size()},
                                         {"test_accuracy", accuracy()},
                                         {"test_samples", accuracy_.samples},
                                         {"train_loss", history_.train_loss},
                                         {"samples_per_second", trained / seconds_},
                                         {"communication_share", share},
                                         {"parameters_hash", hash}};
    if (!(std::ofstream(options_.json) << json.dump(2) << '\n'))
      throw lockstep::Error("cannot write the figures to " + options_.json);
  }

  int epochs_trained() const { return options_.epochs - first_epoch_; }

  const Options options_;
  const lockstep::Context& context_;
  const std::filesystem::path run_dir_;
  lockstep::DataLoader train_;
  lockstep::DataLoader test_;
  Net net_;
  torch::optim::SGD optimizer_;
  History history_;
  int first_epoch_ = 0;
  Evaluation accuracy_{};
  double seconds_ = 0;  ///< of training, without evaluation
};

}  // namespace

int main(int argc, char** argv) {
  Options options;
  CLI::App app{"Trains a small convolutional network on Fashion-MNIST, data-parallel on all ranks of the launcher."};
  app.add_option("--epochs", options.epochs, "Passes over the training images")
      ->capture_default_str()
      ->check(CLI::Range(1, std::numeric_limits<int>::max()));
  app.add_option("--batch-size", options.batch_size, "Images a batch on each rank")
      ->capture_default_str()
      ->check(CLI::Range(1, std::numeric_limits<int>::max()));
  app.add_option("--lr", options.lr, "Peak learning rate")->capture_default_str();
  app.add_option("--seed", options.seed, "Of initial weights and shuffle")->capture_default_str();
  app.add_option("--data", options.data, "Folder of the four IDX files, gzip or raw")->capture_default_str();
  app.add_option("--run-dir", options.run_dir,
                 "Folder of the checkpoint (default: the launcher's, or runs/train_fashion_mnist)");
  app.add_option("--resume", options.resume, "Checkpoint, or the run folder that holds it, to go on from");
  app.add_option("--json", options.json, "File for the figures of the run");
  app.add_option("--backend", options.backend,
                 "Engine of the collectives (docs/backends.md; default: the best that fits)");
  std::string ranks;
  app.add_option("--ranks", ranks, "Start this program as so many ranks, without a launcher (Context sees to it)");
  CLI11_PARSE(app, argc, argv);
  try {
    lockstep::Context context(argc, argv, {.seed = options.seed, .backend = options.backend});
    Training(options, context).run();
  } catch (const c10::Error& error) {
    std::fprintf(stderr, "train_fashion_mnist: %s\n", error.what_without_backtrace());
    return 1;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "train_fashion_mnist: %s\n", error.what());
    return 1;
  }
}
