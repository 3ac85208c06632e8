// Trains a small convolutional network on Fashion-MNIST, on as many ranks as the launcher starts:
//
//     lockstep run -n 2 -- build/bin/train_fashion_mnist --epochs 4
//
// Each epoch ends with a line such as
//
//     epoch 4/4  train loss 0.1866  test accuracy 0.9207 (9207 of 10000)
//
// and saves RUN_DIR/checkpoint.safetensors. --resume RUN_DIR continues from there and ends with the same bits as an
// uninterrupted run. `lockstep report RUN_DIR` makes a page about the run; --json FILE writes its figures.
//
// --memory-every 1 saves to the launcher's memory after every step: `lockstep run --max-restarts 3` then continues
// after a rank has died, and ends with the same bits. --die-at 100 --die-rank 1 demonstrates it. With --virtual-ranks 4
// the bits are the same on 1, 2, 3 or 4 ranks, and `lockstep run --elastic 1:4` may change their number (`lockstep
// resize`).
//
// --sharded replicated or shared divides the optimizer's steps between the ranks; shared keeps the weights once per
// machine, and gives the same bits. With --sync-every 100 each machine trains by itself, and machines synchronise every
// 100 steps and after each epoch (docs/slow_networks.md).

#include <chrono>
#include <cstdio>
#include <optional>
#include <utility>

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include "support/epoch_losses.h"
#include "support/machine_options.h"
#include "support/training_files.h"
#include "support/training_optimizer.h"
#include "support/training_options.h"

namespace {

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
  Training(const TrainingOptions& options, lockstep::Context& context)
      : options_(options),
        context_(context),
        train_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTrain), context,
               {.batch_size = options.batch_size, .shuffle = true, .drop_last = true}),
        test_(lockstep::datasets::FashionMNIST(options.data, lockstep::kTest), context,
              {.batch_size = 500, .exactly_once = true}) {
    if (context.is_main()) training_files::check_figures(options);  // now, not after hours
    if (options.machines.train_separately()) diloco_.emplace(model_, context, options.machines.diloco());
    if (!options.resume.empty()) losses_ = EpochLosses(training_files::load_epoch(*net_, *optimizer_, options.resume));
    if (losses_.count() >= options.epochs)
      throw lockstep::Error(c10::str("nothing is left to train: ", options.resume, " has done ", losses_.count(),
                                     " epochs of --epochs ", options.epochs, "; raise --epochs"));
  }

  /// Returns the exit code.
  int run() {
    train_.set_epoch(losses_.count());
    int64_t first_step = losses_.count() * steps_;
    if (const int64_t kept = resume_from_memory()) first_step = kept;
    const int first_epoch = losses_.count();
    lockstep::RunLog log(context_, {.folder = options_.run_dir, .first_step = first_step});
    log.watch(model_);
    for (const int epoch : train_.epochs(options_.epochs)) {
      if (!train_epoch(log, epoch)) return lockstep::kPreempted;
      if (diloco_) diloco_->finish();  // all machines evaluate and save the same model
      lockstep::evaluate(*net_, test_, context_.group(), metrics_, [&](auto& batch) {
        const torch::Tensor scores = net_(batch.data);
        accuracy_.update(scores, batch.target);
        loss_.update(torch::nn::functional::cross_entropy(scores, batch.target), batch.target.size(0));
      });
      for (const auto& [name, value] : metrics_.values()) log.scalar("test/" + name, value);
      if (memory_) memory_->step(log.steps());
      training_files::save_epoch(*net_, *optimizer_, losses_.done(), context_,
                                 log.folder() + "/checkpoint.safetensors");
      if (!context_.is_main()) continue;
      std::printf("epoch %d/%d  train loss %.4f  test accuracy %.4f (%ld of %ld)\n", epoch + 1, options_.epochs,
                  losses_.done().back(), accuracy_.value(), accuracy_.correct(), accuracy_.count());
      std::fflush(stdout);
    }
    if (memory_) memory_->finish();
    report(options_.epochs - first_epoch, log);
    return 0;
  }

 private:
  /// Ranks that are started again go on from the launcher's memory. Returns the steps that are done, or 0.
  int64_t resume_from_memory() {
    if (options_.memory_every == 0) return 0;
    const std::string folder = training_files::run_folder(options_) + "/memory";
    memory_.emplace(folder, context_.group(),
                    lockstep::CheckpointerOptions{.memory_every_n_steps = options_.memory_every});
    machine_options::add_parts(*memory_, *net_, model_, *optimizer_, diloco_ ? &*diloco_ : nullptr);
    memory_->add("loader", train_);
    losses_.add_to(*memory_, context_.is_main());
    return memory_->resume() ? memory_->resumed_step() : 0;
  }

  /// Returns false if the ranks are to leave, all after the same step: their state is saved.
  bool train_epoch(lockstep::RunLog& log, int epoch) {
    const int64_t steps = options_.epochs * steps_, rising = (steps + 9) / 10;
    const auto schedule =
        lockstep::warm_up(rising, lockstep::cosine_annealing_lr(std::max<int64_t>(1, steps - rising)));
    const auto start = std::chrono::steady_clock::now();
    lockstep::Metrics metrics;
    auto& mean = metrics.add("loss", lockstep::Mean());
    losses_.begin(mean);
    log.epoch(epoch);
    auto bar = lockstep::progress(train_);
    int64_t samples = 0;
    for (auto& [data, target] : bar) {
      const torch::Tensor scores = model_(data);
      const torch::Tensor loss = torch::nn::functional::cross_entropy(scores, target);
      loss.backward();  // gradients are averaged over the ranks while this runs
      mean.update(loss, data.size(0));
      samples += data.size(0);
      if (!model_.step_complete()) continue;  // other virtual ranks of this rank come first
      const double lr = schedule.rate(options_.peak_lr(), log.steps());
      for (auto& group : optimizer_->param_groups()) group.options().set_lr(lr);
      optimizer_->step();
      if (diloco_) diloco_->step();
      optimizer_->zero_grad();

      bar.loss(loss.item<double>());
      bar.communication(model_.communication_seconds());
      const double right = scores.argmax(1).eq(target).to(torch::kDouble).mean().item<double>();
      log.step(std::exchange(samples, 0),
               {{"train/loss", loss.item<double>()}, {"train/accuracy", right}, {"learning_rate", lr}});
      if (log.steps() == options_.die_at) training_files::die_once(options_, context_);
      losses_.note(mean);
      // The last step of an epoch is saved when the epoch has been evaluated.
      if (!memory_ || log.steps() % steps_ == 0) continue;
      memory_->step(log.steps());
      if (!context_.stop_requested()) continue;
      memory_->save(log.steps());
      memory_->finish();
      return false;
    }
    seconds_ += std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
    metrics.reduce(context_.group());
    losses_.end(mean);
    return true;
  }

  int virtual_ranks_here() const {
    return context_.virtual_ranks() == 0 ? 1 : context_.virtual_block().last - context_.virtual_block().first;
  }

  /// On all ranks.
  void report(int epochs, const lockstep::RunLog& log) {
    std::optional<int64_t> sent;
    if (diloco_) sent = machine_options::bytes_between_machines(context_, diloco_->stats().bytes_sent);
    if (!context_.is_main()) return;
    // Where virtual ranks cannot be shared out evenly, this rank has more of the samples than others.
    const int shares = context_.virtual_ranks() == 0 ? context_.world_size() : context_.virtual_ranks();
    const double rate = static_cast<double>(epochs * train_.samples() * shares) / virtual_ranks_here() / seconds_;
    training_files::report(options_, {.world_size = context_.world_size(),
                                      .epochs = epochs,
                                      .seconds = seconds_,
                                      .samples_per_second = rate,
                                      .communication_share = model_.communication_seconds() / seconds_,
                                      .test_accuracy = accuracy_.value(),
                                      .test_samples = accuracy_.count(),
                                      .train_loss = losses_.done(),
                                      .parameters_hash = lockstep::hash(lockstep::state_dict(*net_)),
                                      .folder = log.folder(),
                                      .steps = log.steps(),
                                      .validation_loss = loss_.value(),
                                      .bytes_between_machines = sent});
  }

  const TrainingOptions options_;
  lockstep::Context& context_;
  lockstep::DataLoader train_, test_;
  Net net_;
  lockstep::DistributedDataParallel<Net> model_{net_, machine_options::replicas(options_.machines, context_)};
  std::unique_ptr<torch::optim::Optimizer> optimizer_ = training_optimizer::make(model_, options_);
  std::optional<lockstep::DiLoCo> diloco_;  ///< where machines train by themselves
  lockstep::Metrics metrics_;
  lockstep::Mean& loss_ = metrics_.add("loss", lockstep::Mean());
  lockstep::Accuracy& accuracy_ = metrics_.add("accuracy", lockstep::Accuracy());
  /// In an epoch; each takes a batch of every virtual rank.
  const int64_t steps_ = train_.size() / virtual_ranks_here();
  EpochLosses losses_;
  double seconds_ = 0;  ///< of training, without evaluation
  std::optional<lockstep::Checkpointer> memory_;
};

}  // namespace

int main(int argc, char** argv) {
  TrainingOptions options;
  CLI::App app{"Trains a small convolutional network on Fashion-MNIST, data-parallel on all ranks of the launcher."};
  options.add_to(app);
  return lockstep::run_program(argc, argv, [&] {
    CLI11_PARSE(app, argc, argv);
    lockstep::Context context(
        {.seed = options.seed, .virtual_ranks = options.virtual_ranks, .backend = options.backend});
    return Training(options, context).run();
  });
}
