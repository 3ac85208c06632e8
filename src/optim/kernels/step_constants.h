#pragma once

#include "optim/kernels/step_kernel.h"

namespace lockstep::optim {

// What every element of a step has in common, from an optimizer's numbers: one home, so that the library for C++ and
// that for C step with the same bits.

/// As torch::optim::SGDOptions has them.
struct SgdNumbers {
  double lr, momentum, dampening, weight_decay;
};
/// `first`: there is no momentum yet, and the gradient becomes it undampened.
StepConstants sgd_constants(const SgdNumbers& numbers, bool first);

/// As torch::optim::AdamOptions has them.
struct AdamNumbers {
  double lr, beta1, beta2, eps, weight_decay;
};
/// Of step `t`, the first being 1. `decoupled`: AdamW, whose decay acts on the parameter itself.
StepConstants adam_constants(const AdamNumbers& numbers, double t, bool decoupled);

}  // namespace lockstep::optim
