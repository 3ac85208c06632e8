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

/// Follows the backward passes of a model by hooks on its parameters, and drives a Reduction: when a backward begins,
/// which parameter's gradient is ready, when the outermost one has ended. Whether a backward reduces is decided as it
/// begins.
///
/// Hooks run on the thread of the backward, or on several threads if the graph spans several devices. Two threads in
/// backward passes of one model: a thread whose first gradient comes while the other waits for its reduction waits for
/// the mutex before it accumulates, so its gradient is added. One that comes earlier is an error, and so is one beside
/// an optimizer's step.
class BackwardTracker {
 public:
  /// `objection` returns what is wrong with a backward that begins now, or an empty string. Both others outlive it.
  BackwardTracker(ReductionParts& parts, Reduction& reduction, std::function<std::string()> objection);

  /// Guards the reduction and all that it works with.
  mutable Mutex mutex;

  /// From the next backward on, it drives another.
  void drive(Reduction& reduction) LOCKSTEP_REQUIRES(mutex) { reduction_ = &reduction; }
  Reduction& reduction() LOCKSTEP_REQUIRES(mutex) { return *reduction_; }

  /// The backward that is running reaches parameters that should be followed but are not: it counts like any other.
  void note_unfollowed_backward();

  /// Says that this thread steps the parameters: until end_step(), a backward of another is refused.
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
  /// A backward beside another thread's is a trouble.
  void check_thread(size_t parameter) LOCKSTEP_REQUIRES(mutex);

  ReductionParts& parts_ LOCKSTEP_GUARDED_BY(mutex);
  Reduction* reduction_ LOCKSTEP_GUARDED_BY(mutex);
  const std::function<std::string()> objection_;
  std::atomic<std::thread::id> stepped_by_{};
  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last, so that they are destroyed first
};

}  // namespace lockstep
