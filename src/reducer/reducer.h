#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/backward_passes.h>
#include <lockstep/gradient_reduction.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/facts.h"
#include "reducer/gradient_hook.h"
#include "reducer/non_finite.h"
#include "reducer/timeline.h"

namespace lockstep {

/// Reduces the gradients of a set of parameters over a group while backward runs.
///
/// A backward, seen from here: the hook of each parameter whose gradient is done calls on_gradient, which fills its
/// place in a bucket and launches every bucket that is full, in plan order. When the backward has ended, finish fills
/// the places nobody came for, launches what is left, waits, and the gradients are reduced. Every rank launches all
/// buckets in the same order whatever its own graph looked like, so ranks may use different parameters in a step.
///
/// The last bucket is always launched at the end and carries every rank's Facts. An error that one rank finds (trouble)
/// does not stop its backward: the others wait in it. It rides along, and all ranks throw it together.
///
/// A backward within backward (activation recomputation) may bring gradients of a parameter again. Once one has been
/// seen, buckets are launched at the end only; gradients that it brings late until then are reduced in a second
/// message.
///
/// A rank may skip its share of a reduction. What it brings then are zeros, the mean is over the others, and it gets
/// their result. But a bucket that its failed backward had launched cannot be called back: the step is then nobody's.
///
/// All ranks must build it over the same parameters and run the same number of backward passes between reductions.
/// Hooks run on the thread, or with several devices the threads, of the backward.
class Reducer {
 public:
  struct Events {
    /// Before each reduction: what is wrong with this rank's replica; empty if nothing is.
    std::function<std::string()> inspect;
    /// After each reduction, on all ranks.
    std::function<void(const std::vector<Facts>& ranks)> reduced;
    /// Before this rank takes part in a reduction with gradients; null: nobody asks.
    std::function<void()> reducing = nullptr;
  };

  struct Settings {
    BucketLimits limits;
    GradientReduction reduction;
    int object = 1;  ///< this replica's number on its group, from 1: the same on all ranks
  };

  /// `passes` outlives the reducer; whether a backward reduces is decided as it begins. In a world of one there is
  /// nothing to reduce, but passes are counted and events come as in any other.
  Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events);

  /// What a user has asked for besides; each may be null. Between backward passes.
  struct Equipment {
    CommHookPtr hook;
    std::shared_ptr<NonFiniteWatch> watch;
    std::shared_ptr<Timeline> timeline;
  };
  void equip(Equipment equipment);

  void set_weight(double weight) { mine_.weight = weight; }
  /// Within join(): ranks may become inactive. `divide_by_active`: the mean is that of the active ones.
  void set_joining(bool joining, bool divide_by_active);

  /// Takes the place of another reducer of the same ranks: what that one has reduced lies in .grad. Right after
  /// construction.
  void succeed(const Reducer& before);

  /// The backward that is running reaches parameters that should be followed and are not: it counts as one of this
  /// reducer's, whose inspect() has something to say.
  void notice();

  /// Reduces what is in .grad, outside of a backward. Every rank calls it, or runs a backward that reduces.
  void reduce();
  /// Takes part in a reduction in place of this rank's backward, or of what is left of one that an exception ended.
  void skip();
  /// Takes part in a reduction of the others without gradients. Returns what each rank said.
  std::vector<Facts> shadow();
  /// Takes part in the others' next reduction for the sake of telling them: throws the Error on all ranks.
  void fail(const std::string& trouble);

  /// Seconds backward has waited for communication so far.
  double waited_seconds() const { return waited_seconds_; }
  /// Indices of parameters of each bucket, in the order of reduction.
  const std::vector<std::vector<size_t>>& plan() const { return plan_; }
  const std::vector<Bucket>& buckets() const { return buckets_; }

 private:
  enum class Phase { kIdle, kInBackward, kAbandoned };
  enum class Launching { kWhenFull, kAtEnd };
  /// What this rank brings to a reduction.
  enum class Share { kGradients, kSkipped, kOutOfInputs };

  void follow(size_t parameter, const at::Tensor& tensor);
  void on_gradient(size_t parameter, bool any);
  void on_captured();
  /// Whether a backward was ended by an exception after it had launched buckets.
  bool interrupted() const { return phase_ != Phase::kIdle && launched_ > 0; }
  void begin_reduction();
  void begin_backward();
  void finish();
  void launch_buckets(bool at_end);
  /// The one place where a bucket's gradients go to the other ranks.
  void launch(Bucket& bucket);
  void fill(size_t parameter, bool used);
  std::vector<Facts> reduce_all(Share share);
  /// Facts of all ranks; the buckets are reduced.
  std::vector<Facts> exchange(Share share);
  void wait();
  void judge(const std::vector<Facts>& ranks);
  void judge_objects(const std::vector<Facts>& ranks);
  void judge_passes(const std::vector<Facts>& ranks) const;
  void scale(const std::vector<Facts>& ranks);
  /// Leaves the reduced gradients in .grad, or none.
  void finish_buckets(const std::vector<Facts>& ranks);
  void agree_on_kept(const std::vector<at::Tensor>& kept, int root);
  void judge_non_finite();
  ReduceOp op() const;
  /// What this rank's gradients are multiplied by.
  double weight() const;
  void note_trouble(size_t parameter, const std::string& what);
  /// "bucket 1 of 2 (out.bias to second.weight)", no name longer than that.
  std::string describe(size_t bucket, size_t longest_name = std::string::npos) const;

  struct Place {
    size_t bucket, slot;
  };

  // Constant after construction.
  const Group group_;
  const Settings settings_;
  const Events events_;
  std::vector<std::string> names_;
  std::vector<at::Tensor> tensors_;
  std::vector<std::vector<size_t>> plan_;
  std::vector<std::string> labels_;  ///< of each bucket, for its collectives
  std::vector<Place> places_;        ///< of each parameter

  BackwardPasses& passes_;  ///< owned by the user's thread
  bool divide_by_active_ = false;

  std::mutex mutex_;
  // Guarded by mutex_.
  Phase phase_ = Phase::kIdle;
  Launching launching_ = Launching::kWhenFull;
  bool reduces_ = false;  ///< the backward that phase_ speaks of ends with a reduction
  int backward_ = -1;     ///< its number
  int captured_ = -1;     ///< the last backward that captured gradients
  size_t launched_ = 0;   ///< buckets launched in it
  uint64_t reductions_ = 0;
  Facts mine_;
  std::string trouble_;
  std::vector<Bucket> buckets_;
  Equipment equipment_;
  std::vector<bool> used_;  ///< parameters that a backward reached since the last reduction
  double waited_seconds_ = 0;

  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last: they go first
};

}  // namespace lockstep
