#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "reducer/gradient_hook.h"

namespace lockstep {

/// What a GradScaler's steps have used, and what they have left out: whether an optimizer stepped by itself with the
/// same gradients, which nothing else would tell. Used by the thread that made it.
class UsedGradients {
 public:
  /// The scaler has stepped the optimizer. Until the next backward of this thread another step would be a mistake.
  void stepped(torch::optim::Optimizer& optimizer);
  /// It has found infinity or NaN in the gradients of these parameters. Until their gradients are divided again, that
  /// must not reach them.
  void found_infinity(const std::vector<at::Tensor>& parameters);
  /// The gradients of these are new ones.
  void replaced(const std::vector<at::Tensor>& parameters);

  /// What the program did with them, as a predicate; empty if nothing.
  std::string trouble() const;
  /// Forgets all.
  void clear();

 private:
  /// An element of a parameter that SGD without momentum, which has no state, has stepped.
  struct Point {
    at::Tensor parameter;
    int64_t at;
    double value;      ///< after the step
    double direction;  ///< in which another step would go: its gradient, with weight decay
  };
  struct Step {
    /// Both would be changed by another step; undefined: `points` tell.
    at::Tensor state, parameter;
    uint64_t mark, mark_of_parameter;
    uint64_t weights_set;  ///< times_weights_were_set() then
    std::vector<Point> points;
    double rate;
  };
  static Step step_of(torch::optim::Optimizer& optimizer);
  static bool is_repeated(const Step& step);
  static bool moved_along(const Step& step);
  bool any_is_repeated() const;

  std::map<const c10::TensorImpl*, Step> steps_;  ///< by the optimizer's first parameter
  std::vector<at::Tensor> finite_;                ///< parameters that were, with gradients that are not
  bool repeated_ = false;                         ///< before the last backward
  BackwardWatch watch_{[this] {
    repeated_ = repeated_ || any_is_repeated();
    steps_.clear();
  }};
};

}  // namespace lockstep
