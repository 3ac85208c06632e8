#pragma once

#include <memory>
#include <optional>
#include <vector>

#include <torch/torch.h>

#include <lockstep/autocast.h>
#include <lockstep/diloco.h>
#include <lockstep/ema.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/replica.h>
#include <lockstep/trainer.h>

#include "trainer/trainer_agreement.h"

namespace lockstep {

/// Steps of a Trainer's optimizer, each with precision, scaling, clipping, rates and averages.
class TrainingStep {
 public:
  /// `attached` is the module's Replica; null: the object attaches its own. REQUIRES: the options outlive the object.
  TrainingStep(const std::shared_ptr<torch::nn::Module>& module, Replica* attached, torch::optim::Optimizer& optimizer,
               const Group& group, const TrainerOptions& options)
      : options_(options),
        optimizer_(optimizer),
        replicas_(options.diloco ? group.on_this_machine() : group),
        own_(attached == nullptr ? std::make_unique<Replica>(module, replicas_) : nullptr),
        model_(attached == nullptr ? *own_ : *attached),
        device_(module->parameters().front().device()),
        scaler_(replicas_, {.enabled = options.precision == Precision::kHalf}) {
    if (options.diloco) diloco_.emplace(model_, group, *options.diloco);
    if (options.ema) ema_.emplace(*module, *options.ema);
  }

  template <typename Body>
  auto in_precision(const Body& body) const {
    const AutocastGuard guard({.device = device_.type(),
                               .dtype = options_.precision == Precision::kHalf ? at::kHalf : at::kBFloat16,
                               .enabled = options_.precision != Precision::kFloat});
    return body();
  }

  /// One rank's or virtual rank's share of a step: a backward for each batch and, after the last virtual rank's, the
  /// optimizer's step. `samples` counts all batches. Returns their mean loss.
  template <typename Batch>
  double run(const std::vector<Batch>& batches, int64_t samples) {
    optimizer_.zero_grad();
    const at::Tensor sum = at::zeros({}, at::TensorOptions(device_).dtype(at::kDouble));
    const auto backward = [&](const Batch& batch) {
      at::Tensor share = in_precision(batch.loss);
      check_loss(share);
      share = share.reshape({});
      if (batches.size() > 1) share = share * (static_cast<double>(batch.samples) / static_cast<double>(samples));
      scaler_.scale(share).backward();
      sum.add_(share.detach());
    };
    if (auto local = model_.no_sync(); true)
      for (size_t i = 0; i + 1 < batches.size(); ++i) backward(batches[i]);
    backward(batches.back());
    if (model_.step_complete()) update();  // otherwise other virtual ranks of this rank come first
    return sum.item<double>();
  }

  void follow(const Schedule& schedule) { scheduler_.emplace(optimizer_, schedule); }
  /// Makes the machines' models equal, where each trains by itself.
  void synchronise() {
    if (diloco_) diloco_->synchronise();
  }
  /// Adds what the steps depend on.
  void add_to(Checkpointer& checkpointer, torch::nn::Module& module) {
    using enum Checkpointer::Scope;
    const auto scope = diloco_ ? kEachRank : kAllRanks;
    checkpointer.add("model", module, diloco_ ? kEachRank : kRankZero).add("optimizer", optimizer_, scope);
    if (diloco_) checkpointer.add("diloco", *diloco_);
    if (scheduler_) checkpointer.add("schedule", *scheduler_, scope);
    if (scaler_.is_enabled()) checkpointer.add("scaler", scaler_, scope);
    if (ema_) checkpointer.add("ema", *ema_, scope);
  }
  Replica& model() const { return model_; }
  torch::optim::Optimizer& optimizer() const { return optimizer_; }
  at::Device device() const { return device_; }
  /// Null if the options have none, like the next.
  Ema* ema() { return ema_ ? &*ema_ : nullptr; }
  DiLoCo* diloco() { return diloco_ ? &*diloco_ : nullptr; }

 private:
  void update() {
    if (options_.clip_grad_norm) {
      scaler_.unscale(optimizer_);
      model_.clip_grad_norm(*options_.clip_grad_norm);
    }
    const bool stepped = scaler_.step(optimizer_);
    if (diloco_) diloco_->step();
    if (stepped && scheduler_) scheduler_->step();
    if (stepped && ema_) ema_->update();
    scaler_.update();
  }

  const TrainerOptions& options_;
  torch::optim::Optimizer& optimizer_;
  const Group replicas_;                ///< of the model: of one machine where each trains by itself
  const std::unique_ptr<Replica> own_;  ///< null: `model_` is the caller's
  Replica& model_;
  const at::Device device_;
  GradScaler scaler_;
  std::optional<DiLoCo> diloco_;
  std::optional<Ema> ema_;
  std::optional<LRScheduler> scheduler_;
};

}  // namespace lockstep
