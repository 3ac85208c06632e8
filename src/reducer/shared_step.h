#pragma once

#include <vector>

#include <c10/util/Exception.h>

#include "reducer/facts.h"

namespace lockstep {

/// An optimizer's step that ranks share out, as the model that it steps sees it.
class SharedStep {
 public:
  SharedStep() = default;
  virtual ~SharedStep() = default;
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;

  /// A backward of the model begins, on whichever thread; may throw. `gradients_wait`: those of earlier backward passes
  /// wait for this step, which takes their sum.
  virtual void backward_begins(bool gradients_wait) = 0;

  /// Whether the step takes the sum of all ranks' gradients itself. Else backward reduces them, and what follows here
  /// is never called.
  virtual bool wants_sum() const { return false; }
  /// On a rank that has run out of inputs: does its part of a whole step. Returns the facts of all ranks.
  virtual std::vector<Facts> step_without_inputs() { TORCH_INTERNAL_ASSERT(false, "this step takes no sum"); }
  /// Model.clip_grad_norm() of the sum. Every rank calls it.
  virtual double clip_grad_norm(double /*max_norm*/, double /*norm_type*/) {
    TORCH_INTERNAL_ASSERT(false, "this step takes no sum");
  }
};

}  // namespace lockstep
