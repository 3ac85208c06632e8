#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

// The only place that touches autograd's internals, whose types drift between releases of LibTorch.

namespace lockstep {

/// What is called while gradients of one parameter are computed, on the thread that runs that part of the backward.
struct GradientEvents {
  /// A gradient is about to be accumulated into .grad. May be empty.
  std::function<void()> before;
  /// A gradient has been accumulated into .grad.
  std::function<void()> accumulated;
  /// autograd::grad asked for the gradient: it will not reach .grad.
  std::function<void()> captured;
};

/// Follows the gradients of one parameter until it is destroyed.
class GradientHook {
 public:
  /// `parameter` is a leaf that requires grad; otherwise TORCH_CHECK fails.
  GradientHook(const at::Tensor& parameter, GradientEvents events);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  /// Whether a GradientHook follows the parameter.
  static bool follows(const at::Tensor& parameter);

 private:
  const at::Tensor parameter_;
  const GradientEvents events_;
  /// A pointer whose type differs between releases; holding it keeps autograd from making another accumulator.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator_;
  uintptr_t accumulated_key_;
  unsigned arriving_key_;
};

/// Runs `function` when the backward that is running on this thread has computed all its gradients, on the thread
/// that called it; what it throws, that call throws. `nested`: another backward called it (activation recomputation
/// does so) and is still running. A backward that an exception ends does not run it. Call it within a backward only.
void at_end_of_backward(std::function<void(bool nested)> function);

/// The same at the end of the outermost backward, the one that no other backward called.
struct EndOfBackward {
  std::function<void()> finished;   ///< all gradients are computed
  std::function<void()> nested;     ///< a nested backward has ended, the outer one goes on; once for each level
  std::function<void()> abandoned;  ///< an exception ended it; must not throw
};
void at_end_of_outermost_backward(EndOfBackward end);

/// A number that tells the backward running on this thread from every other.
int current_backward();

}  // namespace lockstep
