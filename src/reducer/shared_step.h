#pragma once

#include <string>
#include <vector>

#include <c10/util/Exception.h>

#include "reducer/facts.h"

namespace lockstep {

/// An optimizer step that ranks share, as seen by the model that it steps.
class SharedStep {
 public:
  SharedStep() = default;
  virtual ~SharedStep() = default;
  SharedStep(const SharedStep&) = delete;
  SharedStep& operator=(const SharedStep&) = delete;

  /// Called when a backward of the model begins, on any thread. Returns the error that all ranks must throw; empty if
  /// none. `gradients_wait`: gradients of earlier backward passes wait for this step, which takes their sum.
  virtual std::string backward_begins(bool gradients_wait) = 0;

  /// Whether the step takes the sum of all ranks' gradients itself. If not, backward reduces them, and the functions
  /// below are never called.
  virtual bool wants_sum() const { return false; }
  /// Called on a rank without inputs: does its part of a whole step. Returns the facts of all ranks.
  virtual std::vector<Facts> step_without_inputs() { TORCH_INTERNAL_ASSERT(false, "this step takes no sum"); }
  /// Implements Model.clip_grad_norm() on the sum.
  /// REQUIRES: every rank calls it.
  virtual double clip_grad_norm(double /*max_norm*/, double /*norm_type*/) {
    TORCH_INTERNAL_ASSERT(false, "this step takes no sum");
  }
};

}  // namespace lockstep
