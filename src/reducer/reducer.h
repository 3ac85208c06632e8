#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "reducer/backward_tracker.h"
#include "reducer/deferred_reduction.h"
#include "reducer/entered_virtual_rank.h"
#include "reducer/gradient_marks.h"
#include "reducer/overlapped_reduction.h"
#include "reducer/reduction.h"
#include "reducer/shared_step.h"
#include "reducer/virtual_reduction.h"

namespace lockstep {

/// Reduces the gradients of a set of parameters over a group. A BackwardTracker follows backward passes and drives one
/// Reduction: usually an OverlappedReduction, which sends gradients while backward runs; a DeferredReduction while an
/// optimizer takes their sum in its own step; or a VirtualReduction where this process works for several virtual ranks.
///
/// Each reduction carries every rank's Facts. When a rank finds an error (trouble), its backward continues, because the
/// other ranks wait for its buckets. The error is sent with them, and all ranks throw it together.
///
/// Events and communication hooks are called while the tracker's mutex is held.
/// REQUIRES: all ranks build it over the same parameters and run the same number of backward passes between reductions.
class Reducer {
 public:
  using Events = ReductionEvents;
  using Settings = ReductionSettings;
  using Equipment = ReductionEquipment;
  using Share = lockstep::Share;
  using Settlement = lockstep::Settlement;

  /// In a world of one there is nothing to reduce, but passes are counted and events are sent as usual.
  /// REQUIRES: `passes` outlives the reducer.
  Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events);

  /// REQUIRES: no backward is running.
  void equip(Equipment equipment);
  void set_weight(double weight);
  /// Within join(): ranks may become inactive. `divide_by_active`: the mean is over the active ranks only.
  void set_joining(bool joining, bool divide_by_active);

  /// Takes over from another reducer of the same ranks: .grad holds that reducer's results. Call it right after
  /// construction.
  void take_over_from(const Reducer& before);

  /// Called in a backward that reaches parameters which should be followed but are not. It counts as one of this
  /// reducer's passes, and inspect() will report the parameters.
  void note_unfollowed_backward() { tracker_.note_unfollowed_backward(); }

  /// Reduces the gradients in .grad, outside a backward. Every rank must call it, or run a backward that reduces.
  void reduce();
  /// Takes part in a reduction in place of this rank's backward, or of the rest of one that an exception ended. If an
  /// optimizer takes the sum, the next settle() does so; until then this only leaves no .grad.
  void skip();
  /// Leaves no .grad of passes that have not been reduced, which shadow() does not count. Returns the number of those
  /// of accumulate(); 0 if their gradients had gone. With virtual ranks shadow() drops them.
  int drop_kept_back();
  /// Takes part in a reduction of the others without gradients. Returns the facts of all ranks.
  std::vector<Facts> shadow();
  /// Takes part in the others' next reduction only to report an error: throws it on all ranks.
  void fail(const std::string& trouble);

  /// From the next backward on, gradients stay in the buckets, and .grad is this rank's own: the step takes the sum,
  /// between settle() and end_step(). On a rank that has run out of inputs, shadow() runs the whole step. Null:
  /// backward reduces again. A reducer that takes over inherits it. TORCH_CHECK fails if there is a communication hook.
  /// REQUIRES: all ranks call it, between backward passes.
  void defer_to(SharedStep* step);
  /// Called by every rank after its deferred backward passes. When it returns, all ranks have filled their buckets,
  /// with zeros where they have no gradient, and no rank changes them before end_step(). Errors that a rank found in
  /// its backward are thrown on all ranks; there is then no end_step().
  Settlement settle(Share share = Share::kGradients);
  /// Whether settle() has returned, and neither end_step() nor anything that changes the buckets has been called since.
  bool is_settled() const;
  /// Called after the step. When it returns, no rank reads the others' buckets any more; `others_read`: it waits for
  /// that. Sends the events of a reduction. Leaves no .grad on a rank that did not take part, and none if gradients
  /// were multiplied by a weight.
  void end_step(const Settlement& settlement, bool others_read = true);

  /// While it lives, its thread steps the parameters, and a backward on another thread is refused.
  class Stepping {
   public:
    explicit Stepping(Reducer& reducer) : tracker_(reducer.tracker_) { tracker_.begin_step(); }
    ~Stepping() { tracker_.end_step(); }
    Stepping(const Stepping&) = delete;
    Stepping& operator=(const Stepping&) = delete;

   private:
    BackwardTracker& tracker_;
  };
  /// Whether .grad has the scale of a GradScaler, which unscale() has not divided yet.
  bool has_scaled_gradients() const;
  /// The reason why this thread cannot step: another is in a backward; empty if none.
  std::string backward_elsewhere() const { return tracker_.is_backward_elsewhere() ? kBesideStep : ""; }

  // The following is constant or, like the content of buckets, read between backward passes. Therefore it is not
  // analysed.
  /// Seconds backward has waited for communication so far. Any thread may call it.
  double waited_seconds() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { return parts_.sender.waited_seconds(); }
  /// The parameters of each bucket, by index, in the order of reduction.
  const std::vector<std::vector<size_t>>& plan() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS {
    return parts_.plan.buckets;
  }
  const std::vector<Bucket>& buckets() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { return parts_.buckets.all(); }

 private:
  /// The reduction in use unless a step takes the sum.
  Reduction& in_backward() LOCKSTEP_REQUIRES(tracker_.mutex);
  /// Accepts changes to the gradients of `parameters` since backward, if they are its own.
  void accept_changes(const TensorSet& parameters);
  std::optional<KnownGradients> known_gradients(const TensorSet& parameters) const;
  bool has_gradients_scaled_by(const ScaledPasses& scaled) const;
  std::string stepped_beside_scaler() const;

  ReductionParts parts_ LOCKSTEP_GUARDED_BY(tracker_.mutex);
  OverlappedReduction overlapped_ LOCKSTEP_GUARDED_BY(tracker_.mutex){parts_};
  std::unique_ptr<VirtualReduction> virtual_ LOCKSTEP_GUARDED_BY(tracker_.mutex);    ///< replaces it; or null
  std::unique_ptr<DeferredReduction> deferred_ LOCKSTEP_GUARDED_BY(tracker_.mutex);  ///< null: no step has taken a sum
  SharedStep* step_ LOCKSTEP_GUARDED_BY(tracker_.mutex) = nullptr;                   ///< that takes the sum; or null
  BackwardTracker tracker_;
  EnteredVirtualRank entered_;
  const AcceptingGradients accepting_{
      {.accept = [this](const TensorSet& parameters) { accept_changes(parameters); },
       .know = [this](const TensorSet& parameters) { return known_gradients(parameters); },
       .changed =
           [this](const TensorSet& parameters) {
             const MutexLock lock(tracker_.mutex);
             return step_ != nullptr && parts_.plan.first_of(parameters) && !deferred_->changes().found().empty();
           },
       .waits = [this](const ScaledPasses& scaled) { return has_gradients_scaled_by(scaled); },
       .stepped = [this] { return stepped_beside_scaler(); }}};
};

}  // namespace lockstep
