#include <lockstep/trainer.h>

#include <algorithm>
#include <utility>

#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/evaluate.h>
#include <lockstep/island.h>
#include <lockstep/progress.h>
#include <lockstep/rank_zero.h>

#include "train/same_data.h"
#include "trainer/best_score.h"
#include "trainer/trainer_agreement.h"
#include "trainer/training_step.h"

namespace lockstep {

struct Trainer::State {
  State(std::shared_ptr<torch::nn::Module> module_, Replica* attached, torch::optim::Optimizer& optimizer,
        const Context& context_, TrainerOptions options_)
      : options(on_island(std::move(options_))),
        context(context_),
        module(std::move(module_)),
        step(module, attached, optimizer, context.group(), options) {}

  /// `done` is by all virtual ranks of this rank.
  void end_step(const LossSum& done, ProgressLine& line) {
    const double mean = done.sum / static_cast<double>(std::max<int64_t>(done.samples, 1));
    line.loss(mean);
    if (log)
      log->step(done.samples,
                {{"train/loss", mean}, {"lr", step.optimizer().param_groups().front().options().get_lr()}});
  }

  /// The number of this rank's virtual ranks, or 1.
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
    if (context.virtual_ranks() > 0) check_same_data(context.group(), train, LoaderFacts::kNextPass);
    LossSum in_step;
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
      const double value = step.run(batches, samples);
      loss.add(value, samples);
      in_step.add(value, samples);
      const bool is_complete = step.model().step_complete();
      if (is_complete) {
        ++result.steps;
        end_step(std::exchange(in_step, {}), line);
      }
      line.communication(step.model().communication_seconds());
      for (const Taken& done : batches) line.step(done.samples);
      left -= static_cast<int64_t>(batches.size());  // the last step gets the epoch's checkpoint
      if (checkpointer && left > 0 && is_complete) checkpointer->step(result.steps);
      if (!pass.ended()) pass.advance();
    }
  }

  void end_epoch(int number) {
    step.synchronise();
    if (log && step.diloco()) log_synchronisations(step.diloco()->stats());
    const at::Tensor sums = at::tensor({loss.sum, static_cast<double>(loss.samples)}, at::kDouble);
    context.group().all_reduce(sums);
    EpochResult epoch{.epoch = number, .loss = (sums[0] / sums[1]).item<double>(), .values = {}};
    loss = {};
    result.epochs = number + 1;
    std::optional<double> score;
    if (evaluation) {
      const std::unique_ptr<Ema::Guard> averaged(step.ema() ? new Ema::Guard(step.ema()->averaged_weights()) : nullptr);
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

  void log_synchronisations(const DiLoCoStats& stats) {
    log->scalar("diloco/rounds", static_cast<double>(stats.rounds));
    log->scalar("diloco/bytes_sent", static_cast<double>(stats.bytes_sent));
    log->scalar("diloco/wait_seconds", stats.wait_seconds);
  }

  /// Whether the score is the best. `score` becomes rank 0's, so that all ranks decide alike even if a metric differs
  /// between them.
  bool judge(double& score) {
    score = from_rank_zero(context.group(), [&] { return score; });
    return best.take(score, result.epochs - 1, options.checkpoints.higher_is_better);
  }

  bool is_to_stop() {
    if (options.patience == 0 || best.waited < options.patience) return false;
    result.stopped_early = c10::str("no better ", options.score, " than ", best.score, " of epoch ", best.epoch + 1,
                                    " in ", best.waited, best.waited == 1 ? " epoch" : " epochs");
    return true;
  }

  void resume(LoaderBase& train) {
    using enum Checkpointer::Scope;
    checkpointer.emplace(options.folder, context.group(), options.checkpoints);
    checkpointer->check_before_saves([this] { step.model().check_divergence(); });
    step.add_to(*checkpointer, *module);
    checkpointer->add("loader", train);
    hook = step.model().comm_hook();
    if (hook && hook->state_dict().size() > 0) checkpointer->add("communication_hook", *hook);
    checkpointer->add("accumulate", accumulation_part(options.accumulate, context));
    checkpointer->add("epochs", result.epochs).add("steps", result.steps).add("waited", best.waited);
    checkpointer->add("best_score", best.score).add("best_epoch", best.epoch);
    checkpointer->add("loss_sum", loss.sum, kEachRank).add("loss_samples", loss.samples, kEachRank);
    checkpointer->resume();
  }

  const TrainerOptions options;
  const Context& context;
  const std::shared_ptr<torch::nn::Module> module;
  TrainingStep step;
  CommHookPtr hook;            ///< the hook whose state is in checkpoints; may be null
  Metrics* metrics = nullptr;  ///< of the evaluation, like the next member; null: none
  std::function<void(torch::nn::Module&, const Group&)> evaluation;
  std::function<void(const EpochResult&)> callback;
  TrainerResult result;
  BestScore best;
  LossSum loss;  ///< in this epoch
  std::optional<RunLog> log;
  std::optional<Checkpointer> checkpointer;  ///< last: refers to the members above
};

namespace {

void check(const torch::nn::Module* module, const torch::optim::Optimizer& optimizer, const TrainerOptions& options) {
  TORCH_CHECK(options.epochs > 0 && options.accumulate > 0, "Trainer: epochs and accumulate must be at least 1");
  TORCH_CHECK(options.patience >= 0, "Trainer: patience is ", options.patience, "; it must be 0 or more");
  TORCH_CHECK(options.patience == 0 || !options.score.empty(),
              "Trainer: patience has no effect without a score; set score");
  TORCH_CHECK(!options.clip_grad_norm || *options.clip_grad_norm > 0, "Trainer: clip_grad_norm is ",
              *options.clip_grad_norm, "; it must be above 0, or unset");
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
  check_same_machines(context.group(), options);
  state_ = std::make_unique<State>(std::move(module), nullptr, optimizer, context, std::move(options));
}
Trainer::Trainer(std::shared_ptr<torch::nn::Module> module, Replica& model, torch::optim::Optimizer& optimizer,
                 const Context& context, TrainerOptions options) {
  check(module.get(), optimizer, options);
  check_attached(context.group(), *module, optimizer, model, options);
  state_ = std::make_unique<State>(std::move(module), &model, optimizer, context, std::move(options));
}
Trainer::~Trainer() = default;
void Trainer::evaluate_by(Metrics& metrics, std::function<void(torch::nn::Module&, const Group&)> evaluation) {
  state_->metrics = &metrics;
  state_->evaluation = std::move(evaluation);
}
at::Device Trainer::device() const { return state_->step.device(); }
void Trainer::in_precision(const std::function<void()>& body) const { state_->step.in_precision(body); }
void Trainer::on_epoch(std::function<void(const EpochResult&)> callback) { state_->callback = std::move(callback); }
Replica& Trainer::model() { return state_->step.model(); }
void Trainer::save_averages(const std::string& path, size_t which) const {
  TORCH_CHECK(state_->step.ema(), "Trainer::save_averages: there are no averages; set TrainerOptions::ema");
  const StateDict averages = state_->step.ema()->averaged_state(which);
  from_rank_zero(state_->context.group(), [&] { save(averages, path); });
}

TrainerResult Trainer::fit_passes(LoaderBase& train, const std::function<Pass()>& begin) {
  auto& state = *state_;
  const auto& options = state.options;
  TORCH_CHECK(state.result.epochs == 0 && state.result.steps == 0, "Trainer::fit() may be called only once");
  const int64_t steps_an_epoch = (train.size() / state.block_size() + options.accumulate - 1) / options.accumulate;
  const int64_t steps = steps_an_epoch * options.epochs;
  check_agreement(state.context.group(),
                  {options, *state.module, state.step.optimizer(), steps, state.metrics != nullptr},
                  [&](const Schedule& schedule) { state.step.follow(schedule); });
  if (!options.folder.empty()) state.resume(train);
  if (options.run_log) {
    RunLogOptions log = *options.run_log;
    if (log.folder.empty()) log.folder = options.folder;
    log.first_step = state.result.steps;
    state.log.emplace(state.context, log).watch(state.step.model());
  }
  for (const int epoch : train.epochs(options.epochs)) {
    if (state.is_to_stop()) break;
    if (state.log) state.log->epoch(epoch);
    state.train_epoch(train, begin, epoch);
    state.end_epoch(epoch);
  }
  if (state.step.diloco() && island().count > 1) state.step.diloco()->finish();  // the others go on without it
  if (state.checkpointer) state.checkpointer->finish();
  state.result.best_score = state.best.score;
  state.result.best_epoch = state.best.epoch;
  return state.result;
}

}  // namespace lockstep
