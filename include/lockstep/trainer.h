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
#include <lockstep/ema.h>
#include <lockstep/evaluate.h>
#include <lockstep/metrics.h>
#include <lockstep/replica.h>
#include <lockstep/run_log.h>
#include <lockstep/schedule.h>

namespace lockstep {

/// What forward computes in: the tensors' own dtypes; bfloat16 by autocast; half by autocast, with a GradScaler.
enum class Precision { kFloat, kBFloat16, kHalf };

struct TrainerOptions {
  int epochs = 1;  ///< in all, those of a resumed checkpoint included
  /// Batches a step of the optimizer. Each sample weighs the same, also where the last batches of an epoch are fewer.
  int accumulate = 1;
  std::optional<double> clip_grad_norm;
  Precision precision = Precision::kFloat;
  /// Of the learning rate, made for the optimizer steps of the whole training. Null: it stays as it is.
  std::function<Schedule(int64_t steps)> schedule;
  std::optional<EmaOptions> ema;  ///< average weights, and evaluate with the first of the averages
  std::string score;              ///< name of the metric that says how good an epoch is; empty: none does
  int patience = 0;               ///< stop after so many epochs in a row without a better score; 0: never
  std::string folder;             ///< of checkpoints, to go on from if there are any; empty: none are written
  /// Besides the one after each epoch. Says whether a higher score is better, too.
  CheckpointerOptions checkpoints = {.every_minutes = 10};
  std::optional<RunLogOptions> run_log;  ///< by default in the folder of the checkpoints
  bool progress = true;                  ///< a line on stderr, of rank 0
};

/// An epoch that is over: the same on every rank.
struct EpochResult {
  int epoch;             ///< counts from 0
  double loss;           ///< mean over the samples of all ranks, each when it was trained on
  MetricValues values;   ///< of the evaluation
  bool is_best = false;  ///< its score is the best so far
};

struct TrainerResult {
  int epochs = 0;     ///< that are over
  int64_t steps = 0;  ///< of the optimizer; those that a GradScaler skipped count, too
  double best_score = std::numeric_limits<double>::quiet_NaN();
  int best_epoch = -1;        ///< counts from 0; -1: no score was taken
  std::string stopped_early;  ///< why; empty: all epochs are done
};

/// The usual loop, of the other headers' parts; its source is short, to be copied where it is not enough.
///
///     lockstep::Trainer trainer(net.ptr(), optimizer, context, {.epochs = 10, .score = "accuracy", .patience = 3});
///     trainer.evaluate_on(test, metrics, [&](auto& batch) { accuracy.update(net(batch.data), batch.target); });
///     trainer.fit(train, [&](auto& batch) { return cross_entropy(net(batch.data), batch.target); });
///
/// Loaders are a DataLoader or an ExampleLoader. The tensors of a batch are moved to the parameters' device, unless its
/// type does not show them (example_loader.h).
///
/// Every rank makes one and the same calls, and steps identically; rank 0 decides when to stop. Used by one thread.
/// What it is given must outlive it.
class Trainer {
 public:
  template <std::derived_from<LoaderBase> Loader>
  using BatchOf = typename Loader::Iterator::value_type;

  /// Attaches to the module as DistributedDataParallel does. TORCH_CHECK fails for options that make no sense.
  Trainer(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer, const Context& context,
          TrainerOptions options = {});
  ~Trainer();

  /// For lockstep::evaluate(), after each epoch.
  template <std::derived_from<LoaderBase> Loader, std::invocable<BatchOf<Loader>&> Step>
  void evaluate_on(Loader& loader, Metrics& metrics, Step step) {
    evaluate_by(metrics, [this, &loader, &metrics, step](torch::nn::Module& module, const Group& group) mutable {
      evaluate(module, loader, group, metrics, [&](BatchOf<Loader>& batch) {
        to_device(batch);
        in_precision([&] { step(batch); });
      });
    });
  }
  /// Is called on every rank after each epoch, before its checkpoint.
  void on_epoch(std::function<void(const EpochResult&)> callback);
  /// For communication hooks, statistics and the like. Checkpoints have the state of a hook registered before fit().
  Replica& model();
  /// Writes the model with average `which` of the options' `ema`, as lockstep::save() writes a state dict: for Python's
  /// load_state_dict, too. Every rank calls it; rank 0 writes. Throws Error on all ranks if it cannot. TORCH_CHECK
  /// fails without `ema`.
  void save_averages(const std::string& path, size_t which = 0) const;

  /// Trains until all epochs are done or the score no longer gets better. `loss` gives the mean over its batch, which
  /// is on the parameters' device; the module stays in train() or eval(), as the caller left it. Once, by every rank.
  /// If it throws, the checkpoints that are written stay.
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
  /// A batch of whatever type.
  struct Taken {
    int64_t samples;
    std::function<at::Tensor()> loss;
  };
  /// An iterator over such.
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
