#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/gradient_hook.h"

namespace lockstep {

/// Averages the gradients of a set of parameters over a group while backward runs.
///
/// A backward, seen from here: the hook of each parameter whose gradient is done calls on_gradient, which fills its
/// place in a bucket and launches every bucket that is full, in plan order. When the backward has ended, finish fills
/// the places nobody came for, launches what is left, waits, and the gradients are averaged. Every rank launches all
/// buckets in the same order whatever its own graph looked like, so ranks may use different parameters in a step.
///
/// All ranks must build it over the same parameters and run the same number of synchronised backward passes.
/// Hooks run on the thread, or with several devices the threads, of the backward.
class Reducer {
 public:
  /// `after_backward` runs once per synchronised backward on all ranks, while the last buckets are still under way.
  Reducer(std::vector<at::Tensor> parameters, Group group, BucketLimits limits, std::function<void()> after_backward);

  /// While false, backward passes accumulate into .grad on this rank alone. The user's thread sets it, between
  /// backward passes.
  bool& synchronized() { return synchronized_; }

  /// Seconds backward has waited for communication so far.
  double waited_seconds() const { return waited_seconds_; }
  /// Indices of parameters of each bucket, in the order of reduction.
  const std::vector<std::vector<size_t>>& plan() const { return plan_; }

 private:
  enum class Phase { kIdle, kInBackward };

  void on_gradient(size_t parameter);
  void begin_backward();
  void launch_full_buckets();
  /// The one place where a bucket's gradients go to the other ranks.
  void launch(Bucket& bucket);
  void finish();

  struct Place {
    size_t bucket, slot;
  };

  // Constant after construction.
  const Group group_;
  const std::function<void()> after_backward_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<Place> places_;  ///< of each parameter

  bool synchronized_ = true;  ///< owned by the user's thread

  std::mutex mutex_;
  // Guarded by mutex_.
  Phase phase_ = Phase::kIdle;
  int backward_ = -1;    ///< the backward that phase_ speaks of
  size_t launched_ = 0;  ///< buckets launched in it
  std::vector<Bucket> buckets_;
  std::vector<bool> used_;  ///< parameters that a backward reached since the last reduction
  double waited_seconds_ = 0;

  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last: they go first
};

}  // namespace lockstep
