#pragma once

#include <concepts>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>

#include <lockstep/checkpointer.h>
#include <lockstep/collate.h>
#include <lockstep/context.h>
#include <lockstep/data_loader.h>
#include <lockstep/diloco.h>
#include <lockstep/ema.h>
#include <lockstep/evaluate.h>
#include <lockstep/metrics.h>
#include <lockstep/module_on_stack.h>
#include <lockstep/replica.h>
#include <lockstep/run_log.h>
#include <lockstep/schedule.h>

namespace lockstep {

/// The dtype of forward: the tensors' own; bfloat16 by autocast; half by autocast with a GradScaler.
enum class Precision { kFloat, kBFloat16, kHalf };

struct TrainerOptions {
  int epochs = 1;  ///< in total, including those of a resumed checkpoint
  /// Batches per optimizer step. Each sample has the same weight, even if the last step of an epoch has fewer batches.
  int accumulate = 1;
  std::optional<double> clip_grad_norm{};
  Precision precision = Precision::kFloat;
  /// Makes the learning rate schedule for the optimizer steps of the whole training. Null: the rate does not change.
  std::function<Schedule(int64_t steps)> schedule{};
  std::optional<EmaOptions> ema{};  ///< average weights, and evaluate with the first of the averages
  /// Each machine trains by itself, and all synchronise every few steps, before evaluations and at the end of an epoch
  /// (diloco.h). A `model` that is given is over Group::on_this_machine(). --islands: files are in folder/machine_<n>.
  std::optional<DiLoCoOptions> diloco{};
  std::string score{};   ///< name of the metric that rates an epoch; empty: none
  int patience = 0;      ///< stop after this many consecutive epochs without a better score; 0: never
  std::string folder{};  ///< of checkpoints, which are resumed if there are any; empty: none are written
  /// For checkpoints besides the one after each epoch. Also says whether a higher score is better.
  CheckpointerOptions checkpoints = {.every_minutes = 10};
  std::optional<RunLogOptions> run_log{};  ///< by default, in the folder of the checkpoints
  bool progress = true;                    ///< a line on rank 0's stderr
};

/// A completed epoch; equal on every rank.
struct EpochResult {
  int epoch = 0;          ///< counts from 0
  double loss = 0;        ///< mean over the samples of all ranks, each when it was trained on
  MetricValues values{};  ///< of the evaluation
  bool is_best = false;   ///< its score is the best so far
};

struct TrainerResult {
  int epochs = 0;     ///< completed
  int64_t steps = 0;  ///< of the optimizer, including those that a GradScaler skipped
  double best_score = std::numeric_limits<double>::quiet_NaN();
  int best_epoch = -1;          ///< counts from 0; -1: there was no score
  std::string stopped_early{};  ///< the reason; empty: all epochs are done
};

/// The usual loop, made from the parts in the other headers. Its source is short: copy it if you need more.
///
///     lockstep::Trainer trainer(net.ptr(), optimizer, context, {.epochs = 10, .score = "accuracy", .patience = 3});
///     trainer.evaluate_on(test, metrics, [&](auto& batch) { accuracy.update(net(batch.data), batch.target); });
///     trainer.fit(train, [&](auto& batch) { return cross_entropy(net(batch.data), batch.target); });
///
/// A loader is a DataLoader or an ExampleLoader. The tensors of a batch are moved to the parameters' device, if its
/// type lists them (example_loader.h).
///
/// Every rank must make one and make the same calls. All ranks take the same steps; rank 0 decides when to stop. Used
/// by one thread. Its arguments must outlive it.
class Trainer {
 public:
  template <std::derived_from<LoaderBase> Loader>
  using BatchOf = typename Loader::Iterator::value_type;

  /// Attaches to the module as DistributedDataParallel does. TORCH_CHECK fails for invalid options.
  Trainer(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer, const Context& context,
          TrainerOptions options = {});
  /// With a `model` that is already attached to the module, as an optimizer whose steps ranks share needs:
  ///
  ///     lockstep::DistributedDataParallel model(net, context);
  ///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
  ///     lockstep::Trainer trainer(net.ptr(), model, optimizer, context, {.epochs = 10});
  ///
  /// Throws Error on all ranks if it is another module's, or without `diloco` has fewer ranks than the context.
  Trainer(std::shared_ptr<torch::nn::Module> module, Replica& model, torch::optim::Optimizer& optimizer,
          const Context& context, TrainerOptions options = {});
  /// With an nn::Module itself, `Net net;`, which must outlive this object and stay where it is.
  template <detail::ModuleItself Module>
  Trainer(Module&& module, torch::optim::Optimizer& optimizer, const Context& context, TrainerOptions options = {})
      : Trainer(detail::borrowed<torch::nn::Module>(module), optimizer, context, std::move(options)) {}
  template <detail::ModuleItself Module>
  Trainer(Module&& module, Replica& model, torch::optim::Optimizer& optimizer, const Context& context,
          TrainerOptions options = {})
      : Trainer(detail::borrowed<torch::nn::Module>(module), model, optimizer, context, std::move(options)) {}
  ~Trainer();

  /// Runs lockstep::evaluate() after each epoch.
  template <std::derived_from<LoaderBase> Loader, std::invocable<BatchOf<Loader>&> Step>
  void evaluate_on(Loader& loader, Metrics& metrics, Step step) {
    evaluate_by(metrics, [this, &loader, &metrics, step](torch::nn::Module& module, const Group& group) mutable {
      evaluate(module, loader, group, metrics, [&](BatchOf<Loader>& batch) {
        to_device(batch);
        in_precision([&] { step(batch); });
      });
    });
  }
  /// Called on every rank after each epoch, before the epoch's checkpoint.
  void on_epoch(std::function<void(const EpochResult&)> callback);
  /// For communication hooks, statistics and so on. Checkpoints include the state of a hook that is registered before
  /// fit().
  Replica& model();
  /// Writes the model with average `which` of the options' `ema`, as lockstep::save() writes a state dict, which
  /// Python's load_state_dict also reads. Every rank must call it; rank 0 writes. Throws Error on all ranks if that
  /// fails. TORCH_CHECK fails without `ema`.
  void save_averages(const std::string& path, size_t which = 0) const;

  /// Trains until all epochs are done or the score stops improving. `loss` returns the mean over its batch, which is on
  /// the parameters' device: TORCH_CHECK fails for anything but one number that depends on parameters. The module stays
  /// in train() or eval() as the caller left it. Every rank must call it, once. Throws Error on all ranks if their
  /// options differ, naming the first that does. After an exception, checkpoints already written remain.
  template <std::derived_from<LoaderBase> Loader, std::invocable<BatchOf<Loader>&> Loss>
  TrainerResult fit(Loader& train, Loss&& loss) {
    return fit_passes(train, [&] {
      auto pass = std::make_shared<typename Loader::Iterator>(train.begin());
      const auto take = [this, pass, &loss] {
        auto batch = std::make_shared<BatchOf<Loader>>(std::move(**pass));
        return Taken{pass->samples(), [this, batch, &loss] {
                       to_device(*batch);
                       return at::Tensor(loss(*batch));
                     }};
      };
      return Pass{[pass] { return *pass == std::default_sentinel; }, [pass] { ++*pass; }, take};
    });
  }

 private:
  /// A batch of any type.
  struct Taken {
    int64_t samples;
    std::function<at::Tensor()> loss;
  };
  /// An iterator over such batches.
  struct Pass {
    std::function<bool()> ended;
    std::function<void()> advance;
    std::function<Taken()> take;
  };
  void evaluate_by(Metrics& metrics, std::function<void(torch::nn::Module&, const Group&)> evaluation);
  TrainerResult fit_passes(LoaderBase& train, const std::function<Pass()>& begin);
  at::Device device() const;
  void in_precision(const std::function<void()>& body) const;
  template <typename B>
  void to_device(B& batch) const {
    if constexpr (detail::shows_tensors<B>())
      detail::for_each_tensor(batch, [device = device()](at::Tensor& tensor) {
        if (tensor.defined()) tensor = tensor.to(device, /*non_blocking=*/true);
      });
  }

  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace lockstep
