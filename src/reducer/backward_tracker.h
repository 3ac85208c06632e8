#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/mutex.h"
#include "reducer/gradient_hook.h"
#include "reducer/reduction.h"

namespace lockstep {

/// Follows the backward passes of a model by hooks on its parameters, and drives a Reduction: it reports when a
/// backward begins, when a parameter's gradient is ready and when the outermost backward has ended. Whether a backward
/// reduces is decided when it begins.
///
/// Hooks run on the thread of the backward, or on several threads if the graph spans several devices. Two threads may
/// be in backward passes of one model: if the second thread's first gradient arrives while the first thread waits for
/// its reduction, the second waits for the mutex before it accumulates, so its gradient is added. An earlier gradient
/// is an error, and so is one during another thread's optimizer step.
///
/// Small gradients are not reported one by one: between two hooks, autograd runs so much code that a hook's own has
/// left the instruction cache, so a thousand of them spend most of their time on fetching it. A hook only notes a small
/// gradient, which stays in .grad, and every 32nd hook reports all of them (report_noted).
class BackwardTracker {
 public:
  /// `objection` returns the reason to refuse a backward that begins now, or an empty string.
  /// REQUIRES: `parts` and `reduction` outlive the tracker.
  BackwardTracker(ReductionParts& parts, Reduction& reduction, std::function<std::string()> objection);
  /// Warns of a step that no backward can report any more.
  ~BackwardTracker();

  /// Guards the reduction and its parts.
  mutable Mutex mutex;

  /// Drives another reduction from the next backward on.
  void drive(Reduction& reduction) LOCKSTEP_REQUIRES(mutex) { reduction_ = &reduction; }
  Reduction& reduction() LOCKSTEP_REQUIRES(mutex) { return *reduction_; }

  /// Called before gradients are reduced or added to: notes a step while they waited.
  void look_for_early_step() LOCKSTEP_REQUIRES(mutex);
  /// Called in a backward that reaches parameters which should be followed but are not. Such a backward counts like any
  /// other.
  void note_unfollowed_backward();

  /// Tells that this thread steps the parameters: until end_step(), a backward on another thread is refused.
  void begin_step() { stepped_by_ = std::this_thread::get_id(); }
  void end_step() { stepped_by_ = std::thread::id(); }
  /// Whether another thread is in a backward.
  bool is_backward_elsewhere() const;

 private:
  void follow(size_t parameter, const at::Tensor& tensor);
  void before_gradient(size_t parameter);
  void accumulated(size_t parameter, bool any);
  void captured();
  /// Reports a gradient in .grad to the reduction.
  void report(size_t parameter) LOCKSTEP_REQUIRES(mutex);
  void report_noted() LOCKSTEP_REQUIRES(mutex);
  /// Records that the backward has reached the parameter.
  void reached(size_t parameter) LOCKSTEP_REQUIRES(mutex);
  void begin_backward() LOCKSTEP_REQUIRES(mutex);
  void end_backward();
  void watch_for_early_step() LOCKSTEP_REQUIRES(mutex);
  std::string early_step_text(size_t parameter) const LOCKSTEP_REQUIRES(mutex);
  bool is_stepped_elsewhere() const;
  /// Whether this thread runs the backward, which has begun, and the reduction does nothing before a gradient. Asked
  /// without the mutex, which is not needed for that and costs time with a thousand small parameters.
  bool is_in_quiet_backward() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
    return quiet_.load(std::memory_order_relaxed) && parts_.backward.is_of_this_thread();
  }
  /// Whether the running backward is that one, and not nested in it.
  bool is_in_outermost_backward() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
    return parts_.backward.number == current_backward();
  }
  /// Notes trouble if another thread is in a backward.
  void check_thread(size_t parameter) LOCKSTEP_REQUIRES(mutex);

  ReductionParts& parts_ LOCKSTEP_GUARDED_BY(mutex);
  Reduction* reduction_ LOCKSTEP_GUARDED_BY(mutex);
  const std::function<std::string()> objection_;
  std::atomic<std::thread::id> stepped_by_{};
  std::atomic<bool> quiet_{false};    ///< !Reduction::acts_before_gradients() in the backward begun last
  const std::vector<uint8_t> waits_;  ///< by parameter: whether its gradient may wait for report_noted()
  std::vector<size_t> noted_;         ///< parameters; owned by the thread of a quiet backward
  bool warned_of_local_steps_ LOCKSTEP_GUARDED_BY(mutex) = false;
  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last, so that they are destroyed first
};

}  // namespace lockstep
