#pragma once

#include <string>
#include <vector>

#include "optim/areas.h"
#include "optim/slice_stepper.h"

namespace lockstep::detail {

/// Steps slices by kernels, which write this rank's slices into all copies on the machine. The optimizer's map holds
/// views of the areas' arrays.
class KernelSlices final : public SliceStepper {
 public:
  /// `masters`: 16-bit parameters have master copies.
  KernelSlices(Areas& areas, const Formula& formula, bool masters)
      : areas_(areas), formula_(formula), masters_(masters) {}

  Outlook prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) override;
  int64_t run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) override;
  void complete(torch::optim::Optimizer& /*optimizer*/) override { areas_.complete(); }

 private:
  optim::Plan plan(torch::optim::Optimizer& optimizer, const StepGradients& gradients, const optim::Intent& intent);
  /// The view of an array that belongs to a parameter. Copies the contents of `held`, this rank's slice of it.
  at::Tensor adopt(const std::string& name, const Areas::Parameter& parameter, const at::Tensor& held,
                   at::ScalarType dtype);

  Areas& areas_;
  const Formula& formula_;
  const bool masters_;
  std::vector<optim::Intent> intents_;
};

}  // namespace lockstep::detail
