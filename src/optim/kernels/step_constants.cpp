#include "optim/kernels/step_constants.h"

#include <cmath>

namespace lockstep::optim {

StepConstants sgd_constants(const SgdNumbers& numbers, bool first) {
  return {.weight_decay = numbers.weight_decay,
          .step_size = numbers.lr,
          .momentum = numbers.momentum,
          .dampened = first ? 1 : 1 - numbers.dampening};
}

StepConstants adam_constants(const AdamNumbers& numbers, double t, bool decoupled) {
  return {.weight_decay = decoupled ? 0 : numbers.weight_decay,
          .decay = decoupled ? 1 - numbers.lr * numbers.weight_decay : 1,
          .step_size = numbers.lr / (1 - std::pow(numbers.beta1, t)),
          .momentum = numbers.beta1,
          .dampened = 1 - numbers.beta1,
          .beta2 = numbers.beta2,
          .one_minus_beta2 = 1 - numbers.beta2,
          .root = std::sqrt(1 - std::pow(numbers.beta2, t)),
          .eps = numbers.eps};
}

}  // namespace lockstep::optim
