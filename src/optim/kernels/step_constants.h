#pragma once

#include "optim/kernels/step_kernel.h"

namespace lockstep::optim {

// Step constants common to all elements, computed from an optimizer's numbers. They are defined once, so that the C++
// and the C library step with the same bits.

/// As in torch::optim::SGDOptions.
struct SgdNumbers {
  double lr, momentum, dampening, weight_decay;
};
/// `first`: there is no momentum yet, and the gradient becomes the momentum, undampened.
StepConstants sgd_constants(const SgdNumbers& numbers, bool first);

/// As in torch::optim::AdamOptions.
struct AdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
};
/// The constants of step `t`, from 1. `decoupled`: AdamW, which applies the decay to the parameter itself.
StepConstants adam_constants(const AdamNumbers& numbers, double t, bool decoupled);

}  // namespace lockstep::optim
