#pragma once

#include <atomic>
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
class BackwardTracker {
 public:
  /// `objection` returns the reason to refuse a backward that begins now, or an empty string.
  /// REQUIRES: `parts` and `reduction` outlive the tracker.
  BackwardTracker(ReductionParts& parts, Reduction& reduction, std::function<std::string()> objection);

  /// Guards the reduction and its parts.
  mutable Mutex mutex;

  /// Drives another reduction from the next backward on.
  void drive(Reduction& reduction) LOCKSTEP_REQUIRES(mutex) { reduction_ = &reduction; }
  Reduction& reduction() LOCKSTEP_REQUIRES(mutex) { return *reduction_; }

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
  void begin_backward() LOCKSTEP_REQUIRES(mutex);
  void end_backward();
  bool is_stepped_elsewhere() const;
  /// Notes trouble if another thread is in a backward.
  void check_thread(size_t parameter) LOCKSTEP_REQUIRES(mutex);

  ReductionParts& parts_ LOCKSTEP_GUARDED_BY(mutex);
  Reduction* reduction_ LOCKSTEP_GUARDED_BY(mutex);
  const std::function<std::string()> objection_;
  std::atomic<std::thread::id> stepped_by_{};
  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last, so that they are destroyed first
};

}  // namespace lockstep
