#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "reducer/gradient_hook.h"

namespace lockstep {

/// The gradients that a GradScaler's steps have used or left out. Detects an optimizer that was stepped directly with
/// the same gradients, which nothing else would show. Used by the thread that made it.
class UsedGradients {
 public:
  /// Tells that the scaler has stepped the optimizer. Another step before this thread's next backward would be a
  /// mistake.
  void stepped(torch::optim::Optimizer& optimizer);
  /// Tells that the gradients of these parameters contain infinity or NaN, which must not reach the parameters until
  /// their gradients are divided again.
  void found_infinity(const std::vector<at::Tensor>& parameters);
  /// Tells that these parameters have new gradients.
  void replaced(const std::vector<at::Tensor>& parameters);

  /// The misuse that was found, as a predicate; empty if none.
  std::string trouble() const;
  /// Forgets all.
  void clear();

 private:
  /// An element of a parameter that SGD without momentum, which has no state, has stepped.
  struct Point {
    at::Tensor parameter;
    int64_t at;
    double value;      ///< after the step
    double direction;  ///< of another step: its gradient, with weight decay
  };
  struct Step {
    /// Another step would change both; undefined: use `points`.
    at::Tensor state, parameter;
    uint64_t mark, mark_of_parameter;
    uint64_t weights_set;  ///< times_weights_were_set() at the step
    std::vector<Point> points;
    double rate;
  };
  static Step step_of(torch::optim::Optimizer& optimizer);
  static bool is_repeated(const Step& step);
  static bool moved_along(const Step& step);
  bool any_is_repeated() const;

  std::map<const c10::TensorImpl*, Step> steps_;  ///< by the optimizer's first parameter
  std::vector<at::Tensor> finite_;                ///< finite parameters whose gradients are not
  bool repeated_ = false;                         ///< before the last backward
  BackwardWatch watch_{[this] {
    repeated_ = repeated_ || any_is_repeated();
    steps_.clear();
  }};
};

}  // namespace lockstep
