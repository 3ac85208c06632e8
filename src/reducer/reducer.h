#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/backward_passes.h>
#include <lockstep/gradient_reduction.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

#include "base/data_passes.h"
#include "base/mutex.h"
#include "reducer/bucket.h"
#include "reducer/bucket_plan.h"
#include "reducer/facts.h"
#include "reducer/gradient_hook.h"
#include "reducer/gradient_marks.h"
#include "reducer/non_finite.h"
#include "reducer/piece_exchange.h"
#include "reducer/timeline.h"
#include "reducer/virtual_step.h"

namespace lockstep {

/// Reduces the gradients of a set of parameters over a group while backward runs.
///
/// A backward, seen from here: when a parameter's gradient is ready, its hook calls on_gradient, which copies it into
/// a bucket and launches every bucket that is full, in plan order. When the backward has ended, finish fills the slots
/// of parameters that got no gradient, launches the remaining buckets and waits; then the gradients are reduced. Every
/// rank launches all buckets in the same order whatever its own graph looked like, so ranks may use different
/// parameters in a step.
///
/// The last bucket is always launched at the end and carries every rank's Facts. When a rank finds an error (trouble),
/// its backward goes on, because the other ranks wait for its buckets. The error travels with them, and all ranks throw
/// it together.
///
/// A backward within backward (activation recomputation) may bring another gradient for a parameter. Once that has
/// happened, buckets are launched only at the end; gradients that arrive late before then are reduced in a second
/// message.
///
/// A rank may skip its share of a reduction. It then contributes zeros, the mean is over the others, and it receives
/// their result. But a bucket that its failed backward has already launched cannot be called back: the step is then
/// void on all ranks.
///
/// Deferred: an optimizer may sum gradients itself (defer). Then backward only fills the buckets.
///
/// Virtual ranks: where this process works for several of them (virtual_leaves.cpp), a reduction follows after a
/// backward of each, and "all ranks" in facts and means are the virtual ranks.
///
/// All ranks must build it over the same parameters and run the same number of backward passes between reductions.
/// Hooks run on the thread of the backward, or on several threads if the graph spans several devices. Events and
/// communication hooks are called while the reducer's mutex is held.
///
/// Two threads in backward passes of one model: a thread whose first gradient comes while the other waits for its
/// reduction waits before it accumulates; one that comes earlier is an error, and so is one beside an optimizer's step.
class Reducer {
 public:
  struct Events {
    /// Before each reduction: returns what is wrong with this rank's replica; empty if nothing is.
    std::function<std::string()> inspect;
    /// After each reduction, on all ranks.
    std::function<void(const std::vector<Facts>& ranks)> reduced;
    /// Before this rank takes part in a reduction with gradients; may be null.
    std::function<void()> reducing = nullptr;
    /// A virtual rank of several is done with its part of the step; may be null. `last`: the last one of this process.
    std::function<void(bool took_part, bool last)> virtual_rank_done = nullptr;
    /// A backward begins, on whichever thread; may be null, and may throw. `awaits_step`: deferred
    /// ones wait for settle().
    std::function<void(bool awaits_step)> backward_begins = nullptr;
  };

  struct Settings {
    BucketLimits limits;
    GradientReduction reduction;
    int object = 1;        ///< this replica's number on its group, from 1: the same on all ranks
    bool list = false;     ///< the parameters are a list, whose tensors may have been replaced
    bool buffers = false;  ///< beside them lie buffers, which a forward may change
  };

  /// `passes` outlives the reducer; whether a backward reduces is decided as it begins. In a world of one there is
  /// nothing to reduce, but passes are counted and events are sent as in any other.
  Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events);

  /// What a user has added; each may be null. Call equip() between backward passes.
  struct Equipment {
    CommHookPtr hook;
    std::shared_ptr<NonFiniteWatch> watch;
    std::shared_ptr<Timeline> timeline;
  };
  void equip(Equipment equipment);

  void set_weight(double weight);
  /// Within join(): ranks may become inactive. `divide_by_active`: the mean is over the active ranks only.
  void set_joining(bool joining, bool divide_by_active);

  /// Takes over from another reducer of the same ranks: .grad holds what that one has reduced. Call it right after
  /// construction.
  void succeed(const Reducer& before);

  /// The backward that is running reaches parameters that should be followed but are not: it counts as one of this
  /// reducer's passes, and inspect() will report the parameters.
  void notice();

  /// Reduces what is in .grad, outside of a backward. Every rank calls it, or runs a backward that reduces.
  void reduce();
  /// Takes part in a reduction in place of this rank's backward, or of the rest of one that an exception ended.
  /// Deferred: the next settle() will; until then this only leaves no .grad.
  void skip();
  /// Takes part in a reduction of the others without gradients. Returns the facts of all ranks.
  std::vector<Facts> shadow();
  /// Takes part in the others' next reduction only to report an error: throws it on all ranks.
  void fail(const std::string& trouble);

  /// What this rank contributes to a reduction.
  enum class Share { kGradients, kSkipped, kOutOfInputs };
  /// A whole step of an optimizer, from settle(share) to conclude(). Returns the facts of all ranks.
  using Step = std::function<std::vector<Facts>(Share share)>;
  /// From the next backward on, gradients stay in the buckets, and .grad is this rank's own: an optimizer takes the
  /// sum, between settle() and conclude(). On a rank that has run out of inputs, shadow() calls `step`, so that it does
  /// its part of the optimizer's step as well. Null: backward reduces again. All ranks call it, between backward
  /// passes; the successor (succeed) inherits it. TORCH_CHECK fails if there is a communication hook.
  void defer(Step step);

  /// What all ranks know before an optimizer's step: the gradient is sum / divisor * factor.
  struct Settlement {
    std::vector<Facts> ranks;
    std::vector<bool> used;  ///< by parameter: some rank has a gradient for it; the others leave it alone
    int divisor = 1;
    double factor = 1;
    bool is_void = false;  ///< the step must not change anything, but conclude() must still be called
  };
  /// Every rank calls it after its deferred backward passes. When it returns, all ranks have filled their buckets, with
  /// zeros where they have no gradient, and no rank changes them before conclude(). Errors that a rank found in its
  /// backward are thrown on all ranks; then there is no conclude().
  Settlement settle(Share share = Share::kGradients);
  /// Whether it has returned, and neither conclude() nor anything that changes the buckets has been called since.
  bool is_settled() const;
  /// After the step. When it returns, no rank reads the others' buckets any more; `others_read`: it waits for that. It
  /// sends the events of a reduction. Leaves no .grad on a rank that did not take part, and none where gradients were
  /// multiplied by a weight.
  void conclude(const Settlement& settlement, bool others_read = true);

  /// While it lives, its thread steps the parameters: a backward of another is refused.
  class Stepping {
   public:
    explicit Stepping(Reducer& reducer);
    ~Stepping();
    Stepping(const Stepping&) = delete;
    Stepping& operator=(const Stepping&) = delete;

   private:
    Reducer& reducer_;
  };
  /// What keeps this thread from stepping: another is in a backward; empty if nothing does.
  std::string backward_elsewhere() const;

  /// Seconds backward has waited for communication so far.
  double waited_seconds() const { return waited_seconds_.load(std::memory_order_relaxed); }
  /// The parameters of each bucket, by index, in the order of reduction.
  const std::vector<std::vector<size_t>>& plan() const { return fixed_.plan; }
  /// Call it between backward passes. Not analysed: the list is constant, and no other thread uses a bucket then.
  const std::vector<Bucket>& buckets() const LOCKSTEP_NO_THREAD_SAFETY_ANALYSIS { return buckets_; }

 private:
  enum class Phase { kIdle, kInBackward, kAbandoned };
  enum class Launching { kWhenFull, kAtEnd };
  /// Of a deferred reduction: a backward, or what stands for it, has begun it; settle() has returned; so has
  /// conclude().
  enum class Stage { kConcluded, kBegun, kSettled };

  struct Place {
    size_t bucket, slot;
  };

  /// What is constant.
  struct Fixed {
    Fixed(const NamedTensors& parameters, Group group, Settings settings, Events events);
    ReduceOp op() const;
    /// Rows in the table of facts.
    int rows() const { return virtual_ranks ? virtual_ranks->count() : group.world_size(); }
    /// "rank" or "virtual rank", of a row.
    const char* row() const { return virtual_ranks ? "virtual rank" : "rank"; }
    int rank_of_row(int row) const { return virtual_ranks ? virtual_ranks->owner(row) : row; }
    /// Hooks of parameters on a CPU run on the thread that called backward.
    bool on_cpu() const { return tensors.front().is_cpu(); }
    /// For sums: the result of an earlier reduction is contributed by rank 0, and this is another rank.
    bool rank_zero_adds_it() const { return settings.reduction == GradientReduction::kSum && group.rank() != 0; }
    /// "bucket 1 of 2 (out.bias to second.weight)", with names cut to `longest_name`.
    std::string describe(size_t bucket, size_t longest_name = std::string::npos) const;

    Group group;
    Settings settings;
    Events events;
    std::shared_ptr<VirtualRanks> virtual_ranks;  ///< null: none, or each rank is one
    std::vector<std::string> names;
    std::vector<at::Tensor> tensors;
    std::vector<std::vector<size_t>> plan;
    std::vector<std::string> labels;  ///< of each bucket, for its collectives
    std::vector<Place> places;        ///< of each parameter
  };

  /// The state of the backward that is running or ran last.
  struct Backward {
    Phase phase = Phase::kIdle;
    Launching launching = Launching::kWhenFull;
    bool reduces = false;     ///< it ends with a reduction
    int number = -1;          ///< see current_backward()
    std::thread::id thread;   ///< that calls it
    int captured = -1;        ///< the last backward that captured gradients
    size_t launched = 0;      ///< buckets launched in it
    std::vector<bool> used;   ///< parameters that were reached since the last reduction
    int deferred_passes = 0;  ///< since the last settle()
    bool skips = false;       ///< deferred: the next settle() is without this rank's gradients
    std::vector<uint64_t> marks;  ///< deferred: of the gradients after the last backward (mark_of), by parameter
    Stage stage = Stage::kConcluded;
    std::thread::id settled_by;       ///< the thread of the last settle()
    std::optional<int> virtual_rank;  ///< that this process has entered last

    /// Whether an exception ended it after it had launched buckets.
    bool interrupted() const { return phase != Phase::kIdle && launched > 0; }
  };

  /// What this rank tells the others with the next reduction.
  struct Message {
    Facts facts;
    std::string trouble;            ///< the error, if facts.trouble
    bool lasting = false;           ///< that trouble is told by the next reduction, whatever comes before
    bool divide_by_active = false;  ///< not sent: the same on all ranks
    bool begins_join = false;       ///< not sent: no reduction since join() began
    NewPasses passes;               ///< of loaders, since the last reduction
    uint64_t passes_seen = 0;
  };

  void follow(size_t parameter, const at::Tensor& tensor);
  void before_gradient(size_t parameter);
  void on_gradient(size_t parameter, bool any);
  void on_captured();
  void finish();

  void begin_reduction() LOCKSTEP_REQUIRES(mutex_);
  void begin_backward() LOCKSTEP_REQUIRES(mutex_);
  // threads.cpp
  void note_beside_step() LOCKSTEP_REQUIRES(mutex_);
  bool is_stepped_elsewhere() const;
  bool is_in_backward_elsewhere() const LOCKSTEP_REQUIRES(mutex_);
  /// A backward beside another thread's is a trouble.
  void look_at_thread(size_t parameter) LOCKSTEP_REQUIRES(mutex_);
  void launch_buckets(bool at_end) LOCKSTEP_REQUIRES(mutex_);
  /// The one place where a bucket's gradients go to the other ranks.
  void launch(Bucket& bucket) LOCKSTEP_REQUIRES(mutex_);
  void fill(size_t parameter, bool used) LOCKSTEP_REQUIRES(mutex_);
  /// Puts what loaders have begun since the last reduction into the message.
  void note_passes() LOCKSTEP_REQUIRES(mutex_);
  /// Facts and trouble, except for what filling the buckets will find.
  void prepare_message(Share share, int passes) LOCKSTEP_REQUIRES(mutex_);
  std::vector<Facts> reduce_all(Share share) LOCKSTEP_REQUIRES(mutex_);
  /// Returns the facts of all ranks; the buckets are reduced.
  std::vector<Facts> exchange(Share share) LOCKSTEP_REQUIRES(mutex_);
  /// `say` writes the facts behind the last bucket, once more where a hook's end comes before that.
  void wait(const std::function<void()>& say) LOCKSTEP_REQUIRES(mutex_);
  void note_hook(size_t bucket, const std::string& problem) LOCKSTEP_REQUIRES(mutex_);
  std::string hook_key(int rank) const LOCKSTEP_REQUIRES(mutex_);
  /// What ranks' hooks have failed by in this reduction, one line a rank.
  std::string hook_problems() const LOCKSTEP_REQUIRES(mutex_);
  /// What this rank's gradients are multiplied by.
  double weight() const LOCKSTEP_REQUIRES(mutex_);
  void note_trouble(size_t parameter, const std::string& what) LOCKSTEP_REQUIRES(mutex_);

  // conclude.cpp
  void judge(const std::vector<Facts>& ranks) LOCKSTEP_REQUIRES(mutex_);
  void judge_objects(const std::vector<Facts>& ranks) const;
  void judge_data(const std::vector<Facts>& ranks) LOCKSTEP_REQUIRES(mutex_);
  void judge_passes(const std::vector<Facts>& ranks) const LOCKSTEP_REQUIRES(mutex_);
  void judge_idle(const std::vector<Facts>& ranks) const;
  /// What the reduced gradients are multiplied by.
  double factor(const std::vector<Facts>& ranks) const LOCKSTEP_REQUIRES(mutex_);
  /// Leaves the reduced gradients in .grad, or none.
  void finish_buckets(const std::vector<Facts>& ranks) LOCKSTEP_REQUIRES(mutex_);
  void agree_on_kept(const std::vector<at::Tensor>& kept, int root) const;
  /// Returns whether some gradient is not finite; then none is left.
  bool judge_non_finite() LOCKSTEP_REQUIRES(mutex_);
  void drop_gradients() const;

  // deferred.cpp
  /// Whether backward passes wait for settle(), and this rank takes part in it.
  bool awaits_step() const LOCKSTEP_REQUIRES(mutex_);
  void set_aside_passes() LOCKSTEP_REQUIRES(mutex_);
  /// If `parameters` are its own, what was done to their gradients since backward is no error.
  void accept(const TensorSet& parameters);
  /// Of the gradients that lie in their buckets; 0 for others.
  std::vector<uint64_t> marks() const LOCKSTEP_REQUIRES(mutex_);
  /// What somebody else has done to the gradients since backward; empty if nothing.
  std::string change_of_gradients() const LOCKSTEP_REQUIRES(mutex_);
  /// The same as the next backward begins.
  std::string change_between_passes() const LOCKSTEP_REQUIRES(mutex_);
  std::string change_of_gradient(size_t parameter) const LOCKSTEP_REQUIRES(mutex_);
  std::optional<Group> ranks_that_reduce(const TensorSet& parameters) const;
  std::optional<bool> has_contributed(const TensorSet& parameters) const;
  bool follows(const TensorSet& parameters) const;
  /// Gradients that somebody has taken away since backward, by parameter.
  std::vector<bool> dropped_gradients() const LOCKSTEP_REQUIRES(mutex_);
  /// Throws on all ranks if ranks have dropped a gradient that others have. `totals`: over the ranks, 1 for a gradient
  /// and kOneDropped for a dropped one.
  void judge_dropped(const std::vector<float>& totals, const std::vector<bool>& dropped) const;
  void skip_deferred() LOCKSTEP_REQUIRES(mutex_);
  /// Throws on all ranks if a step found neither a backward nor a gradient on any, and the parameters are a list.
  void judge_nothing(const Settlement& settlement) const;
  /// Returns which parameters have gradients on this rank.
  std::vector<bool> fill_deferred() LOCKSTEP_REQUIRES(mutex_);
  /// Makes ranks and used those of all ranks. Returns what judge_dropped() wants.
  std::vector<float> exchange(Settlement& settlement, const std::vector<bool>& dropped) LOCKSTEP_REQUIRES(mutex_);

  // virtual_leaves.cpp
  void make_virtual_step();
  /// TORCH_CHECK fails for what cannot be used with virtual ranks.
  void check_virtual(const CommHook* hook, bool defers) const LOCKSTEP_REQUIRES(mutex_);
  /// A backward needs a virtual rank that has been entered.
  void look_at_virtual_rank() LOCKSTEP_REQUIRES(mutex_);
  std::optional<at::ScalarType> travels_as(at::ScalarType type) const LOCKSTEP_REQUIRES(mutex_);
  VirtualStep::Leaf leaf_of(size_t parameter) const LOCKSTEP_REQUIRES(mutex_);
  void begin_leaf_backward() LOCKSTEP_REQUIRES(mutex_);
  /// No parameter has a gradient, or only zeros.
  bool gradients_are_gone() const;
  void on_leaf_gradient(size_t parameter) LOCKSTEP_REQUIRES(mutex_);
  void take_leaf(size_t parameter) LOCKSTEP_REQUIRES(mutex_);
  /// Puts the parameter's partial sums into its bucket, or where they travel.
  void fill_sum(size_t parameter) LOCKSTEP_REQUIRES(mutex_);
  /// How the bucket's pieces travel; null: it is summed as it lies.
  PieceExchange* exchange_of(size_t bucket) LOCKSTEP_REQUIRES(mutex_);
  void end_leaf(Share share) LOCKSTEP_REQUIRES(mutex_);
  /// Whether what .grad holds, or was added to it, is in its bucket.
  bool lies_in_bucket(size_t parameter) const LOCKSTEP_REQUIRES(mutex_);
  void finish_leaf_backward() LOCKSTEP_REQUIRES(mutex_);
  void skip_leaf() LOCKSTEP_REQUIRES(mutex_);
  std::vector<Facts> exchange_leaves(Share share) LOCKSTEP_REQUIRES(mutex_);
  /// What is summed becomes the gradient, multiplied by `scale`.
  void conclude_sums(double scale) LOCKSTEP_REQUIRES(mutex_);

  const Fixed fixed_;
  BackwardPasses& passes_;  ///< owned by the thread that calls backward
  std::atomic<double> waited_seconds_{0};
  std::atomic<std::thread::id> stepped_by_{};  ///< the thread within Stepping

  mutable Mutex mutex_;
  Backward backward_ LOCKSTEP_GUARDED_BY(mutex_);
  Message message_ LOCKSTEP_GUARDED_BY(mutex_);
  Equipment equipment_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Bucket> buckets_ LOCKSTEP_GUARDED_BY(mutex_);
  uint64_t reductions_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  Step deferral_ LOCKSTEP_GUARDED_BY(mutex_);                         ///< null: backward reduces
  std::unique_ptr<VirtualStep> virtual_ LOCKSTEP_GUARDED_BY(mutex_);  ///< null unless there are several virtual ranks
  std::vector<std::unique_ptr<PieceExchange>> exchanges_ LOCKSTEP_GUARDED_BY(mutex_);  ///< by bucket; may be null
  std::shared_ptr<void> leaf_watch_;

  const AcceptingGradients accepting_{[this](const TensorSet& parameters) { accept(parameters); },
                                      [this](const TensorSet& parameters) { return ranks_that_reduce(parameters); },
                                      [this](const TensorSet& parameters) { return has_contributed(parameters); }};
  std::vector<std::unique_ptr<GradientHook>> hooks_;  ///< last, so that they are destroyed first
};

}  // namespace lockstep
