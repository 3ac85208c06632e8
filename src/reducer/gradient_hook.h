#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

// The only place that touches autograd's internals, whose types drift between releases of LibTorch.

namespace lockstep {

/// What is called while gradients of one parameter are computed, on the thread that runs that part of the backward.
struct GradientEvents {
  /// A gradient is about to be accumulated into .grad. May be empty.
  std::function<void()> before;
  /// A gradient has been accumulated into .grad. False: autograd came by, but no function that leads here gave a
  /// gradient (a custom one may give none), so .grad is what it was.
  std::function<void(bool any)> accumulated;
  /// autograd::grad asked for the gradient: it will not reach .grad.
  std::function<void()> captured;
};

/// Follows the gradients of one parameter until it is destroyed, also where set_data(), and with it Module::to(), gives
/// the parameter another dtype or device: autograd then forgets the node that adds to .grad, and the hooks on it, and
/// makes another one. The tensor's own hooks stay, and look for it.
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
  /// A node that adds to .grad. Its pointer's type differs between releases; holding it keeps autograd from making
  /// another.
  struct Accumulator {
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) node;
    uintptr_t key;
  };

  void arriving(bool any);
  bool is_captured() const;

  const at::Tensor parameter_;
  const GradientEvents events_;
  Accumulator accumulator_;
  std::vector<Accumulator> earlier_;  ///< graphs made before a conversion end in these
  unsigned arriving_key_;
};

/// Calls `arriving` before a gradient is accumulated into a tensor that no GradientHook follows.
class GradientAlarm {
 public:
  /// `leaf` need not require grad yet.
  GradientAlarm(const at::Tensor& leaf, std::function<void()> arriving);
  ~GradientAlarm();
  GradientAlarm(const GradientAlarm&) = delete;
  GradientAlarm& operator=(const GradientAlarm&) = delete;

 private:
  const at::Tensor leaf_;
  std::optional<unsigned> key_;  ///< none: it can never require grad
};

/// Calls `look` before each backward of the thread that made it, whichever graph that goes through, but not before one
/// that a backward calls. Hooks that `look` puts on tensors are called in that backward already.
class BackwardWatch {
 public:
  explicit BackwardWatch(std::function<void()> look);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  /// A backward begins on this thread.
  static void begin();

 private:
  const std::function<void()> look_;
  const std::thread::id thread_ = std::this_thread::get_id();
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
