#pragma once

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/areas.h"
#include "optim/gradient_sum.h"
#include "optim/parameter_watch.h"
#include "optim/shared_copy_watch.h"
#include "optim/slice_stepper.h"
#include "optim/step_agreement.h"

namespace lockstep::detail {

/// A step shared by the ranks of one machine or, if they share no memory, of the group. Each steps its slices of the
/// areas (SliceStepper), and the results reach all copies through shared memory or by an all_gather.
///
/// With kernels, or on a device, backward leaves each rank's gradients in its buckets (GradientSum), and the step takes
/// their sum. With a communication hook, on several machines, and for optimizers that only their class can step,
/// backward reduces them, and the step reads this rank's .grad.
///
/// In a step the ranks first tell each other their next action, so that no rank still reads parameters when they are
/// written, and finally wait for each other, so that every rank has all of them.
class ShardedStep final : public Stepper, public SharedStep {
 public:
  /// REQUIRES: every rank makes it; `model` outlives it.
  ShardedStep(const Replica& model, torch::optim::Optimizer& optimizer, const StepKind& kind,
              const ZeroRedundancyOptions& options);
  ~ShardedStep() override;
  ShardedStep(const ShardedStep&) = delete;
  ShardedStep& operator=(const ShardedStep&) = delete;

  std::string backward_begins(bool gradients_wait) override;
  bool wants_sum() const override { return may_take_sum_ && areas_.ranks() == group_.world_size(); }
  std::vector<Facts> step_without_inputs() override;
  double clip_grad_norm(double max_norm, double type) override;

  /// REQUIRES: every rank calls it.
  void step() override;
  void check_state_is_known() const override { slices_->check_state_is_known(); }
  void complete_state() override { slices_->complete(*optimizer_); }
  const Group* slice_holders() const override { return areas_.memory() == nullptr ? &group_ : nullptr; }
  bool adopts_state() const override { return may_take_sum_; }
  void move_to(torch::optim::Optimizer& optimizer) override;
  /// The bytes that this rank's steps by kernels have read and written so far: gradients, parameters and their state.
  int64_t bytes_moved() const { return bytes_moved_ + sum_.bytes_moved(); }

 private:
  /// Whether this step takes the sum of all ranks' gradients; if not, backward has.
  bool takes_sum() const { return may_take_sum_ && model_.is_deferred(); }
  void clip(const StepRequest& request);
  /// The reason why this rank cannot step; empty if none.
  std::string trouble() const;
  SliceStepper::Outlook prepare(const std::string& trouble);
  /// Agrees on the action of all ranks: all of them take it, or none does.
  StepRequest agree(const StepRequest& mine, const std::string& trouble, const SliceStepper::Outlook& outlook) const;
  /// Steps these parameters on all ranks.
  void step_slices(const std::vector<at::Tensor>& parameters);
  /// TORCH_CHECK fails if the model is gone.
  void check_model() const;

  ReplicaState& model_;
  const std::weak_ptr<const bool> model_is_there_;
  const bool may_take_sum_;
  const Group group_;
  torch::optim::Optimizer* optimizer_;
  Areas areas_;
  GradientSum sum_;
  const StepGradients gradients_;
  const std::unique_ptr<SliceStepper> slices_;
  ParameterWatch watch_;                               ///< of each rank's copy
  const std::unique_ptr<SharedCopyWatch> copy_watch_;  ///< null: each rank has its own copy
  std::mutex stepping_;                                ///< held by the thread that steps
  double norm_ = 0;                                    ///< the last result of clip_grad_norm()
  int64_t bytes_moved_ = 0;
};

}  // namespace lockstep::detail
