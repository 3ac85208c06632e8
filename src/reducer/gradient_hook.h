#pragma once

#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/variable.h>

#include <lockstep/error.h>

// This file and followed_result.h are the only users of autograd's internals, whose types change between releases of
// LibTorch.

namespace lockstep {

/// Compiled autograd is told so when it meets a hook.
inline constexpr const char* kCompiledAutograd =
    "compiled autograd cannot run this backward: it would compile the hooks that send gradients to the other ranks. "
    "Call "
    "backward() without it (torch._dynamo.config.compiled_autograd = False); the forward may be compiled";

/// Called while the gradient of one parameter is computed, on the thread that runs that part of the backward.
struct GradientEvents {
  /// Called before a gradient is accumulated into .grad. May be empty.
  std::function<void()> before;
  /// Called after a gradient was accumulated into .grad. False: autograd reached the parameter, but no function gave it
  /// a gradient (a custom function need not), so .grad is unchanged.
  std::function<void(bool any)> accumulated;
  /// Called when autograd::grad asks for the gradient, which then will not reach .grad.
  std::function<void()> captured;
};

/// Follows the gradients of one parameter until it is destroyed, even if set_data() (and so Module::to()) changes the
/// parameter's dtype or device. Autograd then drops the node that accumulates into .grad, with all its hooks, and makes
/// a new one. Hooks on the tensor itself stay, and this one finds the new node.
class GradientHook {
 public:
  /// REQUIRES: `parameter` is a leaf that requires grad; otherwise TORCH_CHECK fails.
  GradientHook(const at::Tensor& parameter, GradientEvents events);
  ~GradientHook();
  GradientHook(const GradientHook&) = delete;
  GradientHook& operator=(const GradientHook&) = delete;

  static bool follows(const at::Tensor& parameter);
  /// Whether c10d's Reducer, and so torch's DistributedDataParallel, reduces the parameter's gradient.
  static bool is_reduced_by_c10d(const at::Tensor& parameter);
  /// Restores the hooks that were dropped (tell_dropped_hooks).
  /// REQUIRES: no backward is running through them.
  static void restore_dropped();

 private:
  /// A node that accumulates into .grad. Its pointer's type differs between releases. While it is held, autograd makes
  /// no other.
  struct Accumulator {
    decltype(torch::autograd::impl::grad_accumulator(std::declval<const at::Tensor&>())) node;
    uintptr_t key;
  };

  void arriving(bool any);
  /// Follows the parameter's present node, if autograd has made a new one.
  void look_for_another_node();
  bool is_captured() const;
  void put_on_tensor();

  const at::Tensor parameter_;
  const GradientEvents events_;
  Accumulator accumulator_;
  std::vector<Accumulator> earlier_;                 ///< of graphs that were built before a conversion
  torch::autograd::FunctionPreHook* arriving_hook_;  ///< on the tensor
};

/// Calls `arriving` before a gradient is accumulated into a tensor that no GradientHook follows.
class GradientAlarm {
 public:
  /// `leaf` need not require grad yet. `accumulated`, if given, is called after each accumulation into .grad, which it
  /// may take away. It replaces a hook of Python's register_post_accumulate_grad_hook().
  GradientAlarm(const at::Tensor& leaf, std::function<void()> arriving, std::function<void()> accumulated = nullptr);
  ~GradientAlarm();
  GradientAlarm(const GradientAlarm&) = delete;
  GradientAlarm& operator=(const GradientAlarm&) = delete;

 private:
  const at::Tensor leaf_;
  torch::autograd::FunctionPreHook* hook_ = nullptr;                      ///< null: it can never require grad
  const torch::autograd::PostAccumulateGradHook* accumulated_ = nullptr;  ///< null: none
};

/// Calls `look` before each backward that starts on the thread that made it, whatever the graph, but not before a
/// nested one. Hooks that `look` registers already run in that backward.
class BackwardWatch {
 public:
  explicit BackwardWatch(std::function<void()> look);
  ~BackwardWatch();
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;

  /// Tells that a backward begins on this thread.
  static void begin();

 private:
  static std::vector<const BackwardWatch*> of_this_thread();

  const std::function<void()> look_;
  const std::thread::id thread_ = std::this_thread::get_id();
};

/// Runs `function` when the backward on this thread has computed all its gradients, on the thread that called
/// backward(). That call throws what `function` throws. `nested`: the backward was called from within another that is
/// still running, as in activation recomputation. If an exception ends the backward, `function` does not run.
/// REQUIRES: this thread is in a backward.
void at_end_of_backward(std::function<void(bool nested)> function);

/// Callbacks for the end of the outermost backward, which was not called from within another.
struct EndOfBackward {
  std::function<void()> finished;   ///< all gradients are computed
  std::function<void()> nested;     ///< a nested backward has ended and the outer one continues; once per level
  std::function<void()> abandoned;  ///< an exception ended it; must not throw
};
void at_end_of_outermost_backward(EndOfBackward end);

/// Passes every Error and c10::Error that backward() is about to throw to `translate`, which may throw another
/// language's exception instead.
/// REQUIRES: no parameter is followed yet.
void translate_errors_of_backward(void (*translate)(const std::exception& error));

/// Registers `later`, which is called when Python's first Tensor.register_hook() on a tensor drops the hooks that C++
/// has put on it. `later` runs in the middle of that call; it must arrange for GradientHook::restore_dropped() to be
/// called right after it.
/// REQUIRES: no parameter is followed yet.
void tell_dropped_hooks(void (*later)());

/// Whether this tensor has other handles.
bool is_held_elsewhere(const at::Tensor& tensor);
/// Installs the test for unused Python objects. A tensor that Python has once seen keeps its Python object, which
/// counts as a handle for as long as the tensor lives; one for which `is_unused` is true is not counted. Called in
/// backward, so it must not take a lock.
void tell_unused_wrappers(bool (*is_unused)(const at::Tensor& tensor));

/// A number that identifies the backward running on this thread.
int current_backward();

/// Whether the backward running on this thread computes all gradients, not only those of some tensors.
bool gradients_go_to_all_leaves();

/// Wraps the process's autograd engine, once, to see every backward.
void watch_engine();

}  // namespace lockstep
