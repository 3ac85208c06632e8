#pragma once

#include <cstdint>
#include <functional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

// The only place that touches autograd's internals, whose types drift between releases of LibTorch.

namespace lockstep {

/// Calls a function each time a backward has accumulated a gradient into a parameter's .grad, on the thread that runs
/// that part of the backward, until it is destroyed.
class GradientHook {
 public:
  /// `parameter` is a leaf that requires grad; otherwise TORCH_CHECK fails.
  GradientHook(const at::Tensor& parameter, std::function<void()> on_gradient);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

 private:
  /// A pointer whose type differs between releases; holding it keeps autograd from making another accumulator.
  decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) accumulator_;
  uintptr_t key_;
};

/// Runs `function` when the backward that is running on this thread has computed all its gradients, on the thread
/// that called backward; what it throws is thrown by backward. Call it from a GradientHook only.
void at_end_of_backward(std::function<void()> function);

/// A number that tells the backward running on this thread from every other.
int current_backward();

}  // namespace lockstep
