#pragma once

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/areas.h"
#include "optim/gradient_sum.h"
#include "optim/own_step.h"
#include "optim/parameter_watch.h"
#include "optim/step_plan.h"

namespace lockstep::detail {

/// A step that ranks share out: of one machine, or, where they share no memory, of the group. Each steps its slices of
/// the areas by kernels and writes what comes of it into all copies of its machine; without shared memory slices then
/// go round. The optimizer's own map holds views of the areas' arrays. On a device, without kernels, LibTorch's own
/// optimizer steps the slices (OwnStep).
///
/// Backward leaves each rank's gradients in its buckets (GradientSum), and the step takes their sum. With a
/// communication hook, and where several machines take part, backward reduces them, and the step reads this rank's
/// .grad: all machines do the same then.
///
/// In a step the ranks first tell each other what they are about to do, so nobody still reads parameters when they are
/// written, and in the end wait for each other, so everybody has all of them.
class ShardedStep final : public SharedStep {
 public:
  /// Every rank makes it. `model` outlives it. `own_step`: what steps parameters on a device.
  ShardedStep(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind, ZeroRedundancyOptions options,
              StepOfItself own_step = nullptr);
  ~ShardedStep() override;

  void backward_begins(bool gradients_wait) override;
  /// Else backward reduces.
  bool takes_sum() const override { return areas_.ranks() == group_.world_size(); }
  std::vector<Facts> step_without_inputs() override;
  double clip_grad_norm(double max_norm, double type) override;

  /// Every rank calls it.
  void step();
  /// Makes the views in the optimizer's map whole, until the next step. Every rank calls it where ranks share no
  /// memory.
  void complete() { own_ ? own_->complete(*optimizer_) : areas_.complete(); }
  /// Null where each rank reaches all of the state.
  const Group* slice_holders() const { return areas_.memory() == nullptr ? &group_ : nullptr; }
  /// The optimizer was moved.
  void move_to(torch::optim::Optimizer& optimizer) { optimizer_ = &optimizer; }
  /// What this rank's steps have read and written so far: gradients, parameters and what is remembered of them.
  int64_t bytes_moved() const { return bytes_moved_ + gradients_.bytes_moved(); }

 private:
  /// What a rank that takes part in a step does next; kFollow: what the others do.
  enum class Action : int64_t { kFollow, kClip, kStep };
  struct Request {
    Action action;
    double max_norm = 0, norm_type = 0;  ///< to clip
  };

  void clip(const Request& request);
  std::vector<optim::Intent> intents() const;
  void take(const std::vector<optim::Intent>& intents);
  using Stepped = std::unordered_set<const c10::TensorImpl*>;
  void step_by_kernels(const std::vector<optim::Intent>& intents);
  void step_by_itself(const Stepped& stepped);

  // step_agreement.cpp
  /// What keeps this rank from stepping; empty if nothing does.
  std::string trouble(const torch::optim::Optimizer& optimizer) const;
  /// Returns a row for each rank.
  at::Tensor say(const Request& mine, const std::string& trouble, const std::vector<optim::Intent>& intents) const;
  /// What all ranks do. Throws on all of them if one is in trouble or about to do something else than the others.
  Request agree(const Request& mine, const std::string& trouble, const std::vector<optim::Intent>& intents) const;

  bool has_masters(at::ScalarType dtype) const { return options_.master_weights && optim::is_16_bit(dtype); }
  optim::Plan plan(torch::optim::Optimizer& optimizer, const optim::Intent& intent);
  /// The view of an array that belongs to a parameter; takes over what `held` has, this rank's slice of it.
  at::Tensor adopt(const std::string& name, const Areas::Parameter& parameter, const at::Tensor& held,
                   at::ScalarType dtype);

  /// TORCH_CHECK fails where the model has gone.
  void check_model() const;

  ReplicaState& model_;
  const std::weak_ptr<const bool> model_is_there_;
  const Formula& formula_;
  const ZeroRedundancyOptions options_;
  const Group group_;
  const StepOfItself own_step_;
  torch::optim::Optimizer* optimizer_;
  Areas areas_;
  std::optional<OwnStep> own_;  ///< on a device, where there are no kernels
  GradientSum gradients_;
  ParameterWatch watch_;
  std::mutex stepping_;  ///< held by the thread that steps
  double norm_ = 0;  ///< that clip_grad_norm() has found last
  int64_t bytes_moved_ = 0;
};

}  // namespace lockstep::detail
