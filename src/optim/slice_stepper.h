#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "optim/gradient_sum.h"
#include "optim/step_plan.h"

namespace lockstep::detail {

/// The gradients that a step reads: the sum of all ranks' gradients if the model leaves it to the step, else .grad,
/// which backward has reduced.
class StepGradients {
 public:
  StepGradients(const ReplicaState& model, GradientSum& sum) : model_(model), sum_(sum) {}

  bool has(const at::Tensor& parameter) const;
  optim::GradientSource source(const optim::Intent& intent) const;
  /// This rank's part, flat, in the parameter's dtype; undefined if there is none. If the step takes the sum on a
  /// device, call collect() first.
  at::Tensor slice_of(const Areas::Parameter& parameter) const;

 private:
  const ReplicaState& model_;
  GradientSum& sum_;
};

/// Steps this rank's slices of the areas: by kernels (KernelSlices) or by the optimizer itself (OwnSlices).
class SliceStepper {
 public:
  /// The effect of a run, known before any memory is written.
  struct Outlook {
    std::vector<at::Tensor> parameters;  ///< that would be stepped
    uint64_t hash = 0;                   ///< of the parameters, rates and states: equal on all ranks
  };

  virtual ~SliceStepper() = default;
  virtual Outlook prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) = 0;
  /// Takes the last prepared step, in this rank's copy of the parameters and, if ranks share memory, in the others'.
  /// Does not communicate. Returns the bytes that kernels have read and written.
  virtual int64_t run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) = 0;
  /// Makes the tensors in the optimizer's map whole until the next run(). On a device, repeated calls send nothing.
  /// REQUIRES: every rank calls it if ranks share no memory.
  virtual void complete(torch::optim::Optimizer& optimizer) = 0;
  /// TORCH_CHECK fails if only the optimizer knows its state.
  virtual void check_state_is_known() const {}
};

}  // namespace lockstep::detail
