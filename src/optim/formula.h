#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/zero_redundancy_optimizer.h>

#include "optim/kernels/step_kernel.h"

namespace lockstep {

/// One of LibTorch's optimizers in terms of the step kernels. It is stateless: options are in the parameter groups, and
/// parameter state is in the optimizer's own map.
class Formula {
 public:
  virtual ~Formula() = default;

  virtual optim::Algorithm algorithm(const torch::optim::OptimizerOptions& options) const = 0;
  virtual std::unique_ptr<torch::optim::OptimizerParamState> new_state(bool with_master) const = 0;
  /// A copy of `state` that is also a Master.
  virtual std::unique_ptr<torch::optim::OptimizerParamState> with_master(
      const torch::optim::OptimizerParamState& state) const = 0;
  /// The `index`-th array of a state; undefined until it is set.
  virtual at::Tensor array(const torch::optim::OptimizerParamState& state, int index) const = 0;
  virtual void set_array(torch::optim::OptimizerParamState& state, int index, const at::Tensor& array) const = 0;
  /// Constants of the next step, common to all elements of a parameter with this state (null: none yet).
  virtual optim::StepConstants next(const torch::optim::OptimizerParamState* state,
                                    const torch::optim::OptimizerOptions& options) const = 0;
  /// Counts a step taken.
  virtual void count(torch::optim::OptimizerParamState& state) const = 0;
};

/// TORCH_CHECK fails for kNone.
const Formula& formula_of(detail::FormulaKind kind);

}  // namespace lockstep
