#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include <lockstep/zero_redundancy_optimizer.h>

namespace lockstep::detail {

/// In the place of an array's number: the master.
inline constexpr int kMasterArray = -1;
/// Makes zeros for the `array`-th array of a parameter's state, with the shape and strides of the parameter.
using StateZeros = std::function<at::Tensor(const at::Tensor& parameter, int array, at::ScalarType dtype)>;

/// The step of one process. Null if the optimizer's own step() suffices.
std::unique_ptr<Stepper> make_local_stepper(torch::optim::Optimizer& optimizer, const StepKind& kind,
                                            const ZeroRedundancyOptions& options, StateZeros zeros);

}  // namespace lockstep::detail
