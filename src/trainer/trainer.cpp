#include <lockstep/trainer.h>

#include <algorithm>
#include <utility>

#include <torch/torch.h>

#include <lockstep/autocast.h>
#include <lockstep/comm_hook.h>
#include <lockstep/evaluate.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/progress.h>
#include <lockstep/rank_zero.h>

#include "train/same_data.h"
#include "trainer/trainer_agreement.h"

namespace lockstep {

struct Trainer::State {
  State(std::shared_ptr<torch::nn::Module> module_, Replica* attached, torch::optim::Optimizer& optimizer_,
        const Context& context_, TrainerOptions options_)
      : options(std::move(options_)),
        context(context_),
        module(std::move(module_)),
        optimizer(optimizer_),
        own(attached == nullptr ? std::make_unique<Replica>(module, context.group()) : nullptr),
        model(attached == nullptr ? *own : *attached),
        device(module->parameters().front().device()),
        scaler(context.group(), {.enabled = options.precision == Precision::kHalf}) {
    if (options.ema) ema.emplace(*module, *options.ema);
  }

  /// Runs `body` in the precision of the options.
  template <typename Body>
  auto in_precision(const Body& body) const {
    const AutocastGuard guard({.device = device.type(),
                               .dtype = options.precision == Precision::kHalf ? at::kHalf : at::kBFloat16,
                               .enabled = options.precision != Precision::kFloat});
    return body();
  }

  /// One step of the optimizer. Returns the mean loss of this rank's samples.
  double step(const std::vector<Taken>& batches, int64_t samples) {
    optimizer.zero_grad();
    const at::Tensor sum = at::zeros({}, at::TensorOptions(device).dtype(at::kDouble));
    const auto backward = [&](const Taken& batch) {
      at::Tensor share = in_precision(batch.loss);
      check_loss(share);
      share = share.reshape({});
      if (batches.size() > 1) share = share * (static_cast<double>(batch.samples) / static_cast<double>(samples));
      scaler.scale(share).backward();
      sum.add_(share.detach());
    };
    if (auto local = model.no_sync(); true)
      for (size_t i = 0; i + 1 < batches.size(); ++i) backward(batches[i]);
    backward(batches.back());
    if (!model.step_complete()) return sum.item<double>();  // other virtual ranks of this rank come first
    if (options.clip_grad_norm) {
      scaler.unscale(optimizer);
      model.clip_grad_norm(*options.clip_grad_norm);
    }
    const bool stepped = scaler.step(optimizer);
    if (stepped && scheduler) scheduler->step();
    if (stepped && ema) ema->update();
    scaler.update();
    ++result.steps;
    return sum.item<double>();
  }

  /// What this rank's samples of one step of the optimizer came to, those of all its virtual ranks.
  struct InStep {
    double loss_sum = 0;
    int64_t samples = 0;
  };

  void end_step(const InStep& done, ProgressLine& line) {
    const double mean = done.loss_sum / static_cast<double>(std::max<int64_t>(done.samples, 1));
    line.loss(mean);
    if (log)
      log->step(done.samples, {{"train/loss", mean}, {"lr", optimizer.param_groups().front().options().get_lr()}});
  }

  /// The virtual ranks of this rank, or 1.
  int64_t block_size() const {
    if (context.virtual_ranks() == 0) return 1;
    const auto [first, last] = context.virtual_block();
    return last - first;
  }

  void train_epoch(const LoaderBase& train, const std::function<Pass()>& begin, int epoch) {
    int64_t left = train.steps_left(), before = train.first_step();
    ProgressLine line;
    if (options.progress)
      line = ProgressLine({.epoch = epoch,
                           .epochs = options.epochs,
                           .steps = before + left,
                           .first_step = before,
                           .rank = context.rank(),
                           .world_size = context.world_size(),
                           .batches_per_step = block_size() * options.accumulate,
                           .share = train.share()});
    if (context.virtual_ranks() > 0) check_same_data(context.group(), train, LoaderFacts::kOptions);
    InStep in_step;
    const Pass pass = begin();
    if (context.virtual_ranks() == 0) check_same_data(context.group(), train, LoaderFacts::kPlace);
    while (!pass.ended()) {
      std::vector<Taken> batches;
      int64_t samples = 0;
      // Do not advance yet: in a checkpoint the loader must not be ahead of the training.
      while (true) {
        batches.push_back(pass.take());
        samples += batches.back().samples;
        if (batches.size() == static_cast<size_t>(options.accumulate)) break;
        pass.advance();
        if (pass.ended()) break;
      }
      const double value = step(batches, samples);
      loss_sum += value * static_cast<double>(samples), loss_samples += samples;
      in_step.loss_sum += value * static_cast<double>(samples), in_step.samples += samples;
      if (model.step_complete()) end_step(std::exchange(in_step, {}), line);
      line.communication(model.communication_seconds());
      for (const Taken& done : batches) line.step(done.samples);
      left -= static_cast<int64_t>(batches.size());  // the last step gets the epoch's checkpoint
      if (checkpointer && left > 0 && model.step_complete()) checkpointer->step(result.steps);
      if (!pass.ended()) pass.advance();
    }
  }

  void end_epoch(int number) {
    const at::Tensor sums = at::tensor({loss_sum, static_cast<double>(loss_samples)}, at::kDouble);
    context.group().all_reduce(sums);
    EpochResult epoch{.epoch = number, .loss = (sums[0] / sums[1]).item<double>(), .values = {}};
    loss_sum = 0, loss_samples = 0;
    result.epochs = number + 1;
    std::optional<double> score;
    if (evaluation) {
      const std::unique_ptr<Ema::Guard> averaged(ema ? new Ema::Guard(ema->averaged_weights()) : nullptr);
      evaluation(*module, context.group());
      epoch.values = metrics->values();
    }
    for (const auto& [name, value] : epoch.values) {
      if (log) log->scalar("valid/" + name, value);
      if (name == options.score) score = value;
    }
    TORCH_CHECK(score || options.score.empty(), "Trainer: the score `", options.score, "` is not one of the metrics, ",
                metrics != nullptr ? metrics->to_string() : "because evaluate_on() was not called");
    if (score) epoch.is_best = judge(*score);
    if (callback) callback(epoch);
    if (checkpointer) checkpointer->save(result.steps, score);
  }

  /// Whether the score is the best. `score` becomes rank 0's, so that all ranks decide alike even if a metric differs
  /// between them.
  bool judge(double& score) {
    score = from_rank_zero(context.group(), [&] { return score; });
    const bool better = options.checkpoints.higher_is_better ? score > result.best_score : score < result.best_score;
    const bool is_best = std::isfinite(score) && (better || result.best_epoch < 0);
    waited = is_best ? 0 : waited + 1;
    if (is_best) result.best_score = score, result.best_epoch = result.epochs - 1;
    return is_best;
  }

  bool is_to_stop() {
    if (options.patience == 0 || waited < options.patience) return false;
    result.stopped_early = c10::str("no better ", options.score, " than ", result.best_score, " of epoch ",
                                    result.best_epoch + 1, " in ", waited, waited == 1 ? " epoch" : " epochs");
    return true;
  }

  void resume(LoaderBase& train) {
    using enum Checkpointer::Scope;
    checkpointer.emplace(options.folder, context.group(), options.checkpoints);
    checkpointer->check_before_saves([this] { model.check_divergence(); });
    checkpointer->add("model", *module, kRankZero).add("optimizer", optimizer).add("loader", train);
    if (scheduler) checkpointer->add("schedule", *scheduler);
    if (scaler.is_enabled()) checkpointer->add("scaler", scaler);
    if (ema) checkpointer->add("ema", *ema);
    hook = model.comm_hook();
    if (hook && hook->state_dict().size() > 0) checkpointer->add("communication_hook", *hook);
    checkpointer->add("accumulate", accumulation_part(options.accumulate, context.world_size()));
    checkpointer->add("epochs", result.epochs).add("steps", result.steps).add("waited", waited);
    checkpointer->add("best_score", result.best_score).add("best_epoch", result.best_epoch);
    checkpointer->add("loss_sum", loss_sum, kEachRank).add("loss_samples", loss_samples, kEachRank);
    checkpointer->resume();
  }

  const TrainerOptions options;
  const Context& context;
  const std::shared_ptr<torch::nn::Module> module;
  torch::optim::Optimizer& optimizer;
  const std::unique_ptr<Replica> own;  ///< null: `model` is the caller's
  Replica& model;
  const at::Device device;
  GradScaler scaler;
  std::optional<Ema> ema;
  CommHookPtr hook;  ///< the hook whose state is in checkpoints; may be null
  std::optional<LRScheduler> scheduler;
  Metrics* metrics = nullptr;  ///< of the evaluation, like the next member; null: there is none
  std::function<void(torch::nn::Module&, const Group&)> evaluation;
  std::function<void(const EpochResult&)> callback;
  TrainerResult result;
  int waited = 0;            ///< epochs without a better score
  double loss_sum = 0;       ///< of this rank's samples in this epoch
  int64_t loss_samples = 0;  ///< with it
  std::optional<RunLog> log;
  std::optional<Checkpointer> checkpointer;  ///< last: refers to the members above
};

namespace {

void check(const torch::nn::Module* module, const torch::optim::Optimizer& optimizer, const TrainerOptions& options) {
  TORCH_CHECK(options.epochs > 0 && options.accumulate > 0, "Trainer: epochs and accumulate must be at least 1");
  TORCH_CHECK(options.patience >= 0, "Trainer: patience is ", options.patience, "; it must be 0 or more");
  TORCH_CHECK(options.patience == 0 || !options.score.empty(),
              "Trainer: patience has no effect without a score; set score");
  TORCH_CHECK(module != nullptr && !module->parameters().empty(), "Trainer: the module has no parameters to train");
  int held = 0;
  const auto parameters = module->parameters();
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& one : group.params())
      held += std::any_of(parameters.begin(), parameters.end(), [&](const auto& other) { return other.is_same(one); });
  TORCH_CHECK(held > 0, "Trainer: the optimizer holds no parameter of the module; make it with module->parameters()");
}

}  // namespace

Trainer::Trainer(std::shared_ptr<torch::nn::Module> module, torch::optim::Optimizer& optimizer, const Context& context,
                 TrainerOptions options) {
  check(module.get(), optimizer, options);
  state_ = std::make_unique<State>(std::move(module), nullptr, optimizer, context, std::move(options));
}
Trainer::Trainer(std::shared_ptr<torch::nn::Module> module, Replica& model, torch::optim::Optimizer& optimizer,
                 const Context& context, TrainerOptions options) {
  check(module.get(), optimizer, options);
  state_ = std::make_unique<State>(std::move(module), &model, optimizer, context, std::move(options));
}

Trainer::~Trainer() = default;
void Trainer::evaluate_by(Metrics& metrics, std::function<void(torch::nn::Module&, const Group&)> evaluation) {
  state_->metrics = &metrics;
  state_->evaluation = std::move(evaluation);
}
at::Device Trainer::device() const { return state_->device; }
void Trainer::in_precision(const std::function<void()>& body) const { state_->in_precision(body); }
void Trainer::on_epoch(std::function<void(const EpochResult&)> callback) { state_->callback = std::move(callback); }
Replica& Trainer::model() { return state_->model; }
void Trainer::save_averages(const std::string& path, size_t which) const {
  TORCH_CHECK(state_->ema, "Trainer::save_averages: there are no averages; set TrainerOptions::ema");
  const StateDict averages = state_->ema->averaged_state(which);
  from_rank_zero(state_->context.group(), [&] { save(averages, path); });
}

TrainerResult Trainer::fit_passes(LoaderBase& train, const std::function<Pass()>& begin) {
  auto& state = *state_;
  const auto& options = state.options;
  TORCH_CHECK(state.result.epochs == 0 && state.result.steps == 0, "Trainer::fit() may be called only once");
  const int64_t steps_an_epoch = (train.size() / state.block_size() + options.accumulate - 1) / options.accumulate;
  const int64_t steps = steps_an_epoch * options.epochs;
  const std::optional<Schedule> schedule =
      options.schedule ? std::optional(options.schedule(steps)) : std::optional<Schedule>();
  check_agreement(state.context.group(), options, state.optimizer, schedule ? &*schedule : nullptr, steps,
                  state.metrics != nullptr);
  if (schedule) state.scheduler.emplace(state.optimizer, *schedule);
  if (!options.folder.empty()) state.resume(train);
  if (options.run_log) {
    RunLogOptions log = *options.run_log;
    if (log.folder.empty()) log.folder = options.folder;
    log.first_step = state.result.steps;
    state.log.emplace(state.context, log).watch(state.model);
  }
  for (const int epoch : train.epochs(options.epochs)) {
    if (state.is_to_stop()) break;
    if (state.log) state.log->epoch(epoch);
    state.train_epoch(train, begin, epoch);
    state.end_epoch(epoch);
  }
  if (state.checkpointer) state.checkpointer->finish();
  return state.result;
}

}  // namespace lockstep
