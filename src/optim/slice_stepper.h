#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "optim/gradient_sum.h"
#include "optim/step_plan.h"

namespace lockstep::detail {

/// The gradients that a step reads: the sum of all ranks' where the model leaves it to the step, else .grad, which
/// backward has reduced.
class StepGradients {
 public:
  StepGradients(const ReplicaState& model, GradientSum& sum) : model_(model), sum_(sum) {}

  /// Whether the parameter is stepped.
  bool has(const at::Tensor& parameter) const;
  optim::GradientSource source(const optim::Intent& intent) const;
  /// This rank's part, flat, in the parameter's dtype; undefined where there is none. Where the step takes the sum: on a
  /// device, after collect().
  at::Tensor slice_of(const Areas::Parameter& parameter) const;

 private:
  const ReplicaState& model_;
  GradientSum& sum_;
};

/// Steps this rank's slices of the areas: by kernels (KernelSlices), or as the optimizer does by itself (OwnSlices).
class SliceStepper {
 public:
  /// The effect of a run, known before any memory is written.
  struct Outlook {
    std::vector<at::Tensor> parameters;  ///< that would be stepped
    uint64_t hash = 0;  ///< of which these are, at which rates and from which state: the same on all ranks
  };

  virtual ~SliceStepper() = default;
  virtual Outlook prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) = 0;
  /// Takes the step that was prepared last, into this rank's copy of the parameters and, where ranks share memory, the
  /// others'. No messages. Returns how many bytes kernels have read and written.
  virtual int64_t run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) = 0;
  /// Makes the tensors in the optimizer's map whole, until the next run(). Every rank calls it where ranks share no
  /// memory; on a device, calls that follow find it done and send nothing.
  virtual void complete(torch::optim::Optimizer& optimizer) = 0;
  /// TORCH_CHECK fails where only the optimizer knows what it remembers.
  virtual void check_state_is_known() const {}
};

}  // namespace lockstep::detail
