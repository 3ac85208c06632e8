#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/backward_passes.h>
#include <lockstep/distributed_data_parallel_options.h>
#include <lockstep/group.h>
#include <lockstep/named_tensors.h>
#include <lockstep/non_finite_policy.h>
#include <lockstep/reduction_stats.h>

namespace torch {
namespace nn {
class Module;
}
namespace jit {
struct Module;
}
}  // namespace torch

namespace lockstep {

class CommHook;
class Observer;

/// What DistributedDataParallel does, for parameters whose module's type is of no interest. Every method is for the
/// thread that made the object, between backward passes; those that say so must be called by every rank.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, const Group& group, DistributedDataParallelOptions options = {});
  Replica(const torch::jit::Module& module, const Group& group, DistributedDataParallelOptions options = {});
  Replica(NamedTensors parameters, const Group& group, DistributedDataParallelOptions options = {});
  ~Replica();
  Replica(Replica&&) noexcept;
  Replica& operator=(Replica&&) = delete;

  [[nodiscard]] NoSyncGuard no_sync();
  /// `n` >= 1. Divide the loss by n to get the mean over the n passes. What is left when the data ends in between is
  /// reduced by the next backward that reduces, or by reduce_gradients().
  [[nodiscard]] Accumulation accumulate(int n);
  /// Reduces what no_sync() or accumulate() left in .grad, without a backward. A rank that has run no backward since
  /// the last reduction takes part with zeros, and the mean counts it. Every rank must call it, or run a backward that
  /// reduces.
  void reduce_gradients();
  /// Leaves this rank's share of a step out, where its batch is bad:
  ///
  ///     try {
  ///       loss_of(model(data)).backward();
  ///     } catch (const BadBatch&) {
  ///       model.skip_step();
  ///     }
  ///     optimizer.step();
  ///
  /// It stands for the backward that failed, or was not run: it takes part in the others' next reduction, and every
  /// rank, this one too, has the mean over the ranks that did not skip (or their sum). What this rank has computed
  /// since the last reduction is dropped, with accumulate(n) all passes so far; those that are left must not be run.
  ///
  /// If all ranks skip, or if this rank's backward failed after a bucket of its gradients had been sent, which cannot
  /// be called back, the step is nobody's: .grad is undefined on all ranks, so that optimizer.step() changes nothing,
  /// and skipped_steps() counts it. Buckets are sent early only where there are several: a first_bucket_cap_mb above
  /// the size of the model makes one.
  void skip_step();
  /// GradientReduction::kWeightedMean: the weight (samples, tokens) of this rank's gradients in the reductions to come;
  /// 1 until set. 0 is a rank without a share. Each rank sets its own.
  void set_weight(double weight);

  /// Runs `body`, a loop over inputs that may be fewer on some ranks. A rank whose body has returned takes part in the
  /// others' reductions, with no gradient, until all have returned; then every rank has the parameters and buffers of
  /// the last one that had inputs. One reduction between two zero_grad() inside. Every rank must call it.
  void join(const std::function<void()>& body, const JoinOptions& options = {});

  /// Sets every parameter and buffer to rank `root`'s. Every rank must call it.
  void broadcast_parameters(int root = 0);
  /// Sets every parameter, and every floating point buffer, to the mean over the ranks weighted by each rank's
  /// `weight`; other buffers follow rank 0. Every rank must call it, with a weight of its own.
  void average_parameters(double weight = 1);
  /// Looks at the module anew after layers were added, replaced or removed, or parameters frozen or unfrozen, and
  /// follows what is there. New parameters and buffers are compared across ranks and set to rank 0's; the others stay
  /// as they are on each rank. Parameters that are new want a place in the optimizer: that is the user's. Those that
  /// have not changed ten reductions after their first gradient are named in a warning on rank 0. Every rank must call
  /// it. If it throws (the ranks' modules differ, which names the first difference; a rank is out of memory), it throws
  /// on all ranks, and training goes on with what was followed before.
  void refresh();
  /// The same for a list of parameters: it takes the place of the old one. Neither name nor tensor may come twice.
  void refresh(NamedTensors parameters);

  /// Compares all parameters and, unless buffers are each rank's own, buffers in the n-th reduction and every n-th
  /// after it, bit by bit through hashes in one small message. The Error on all ranks names the tensor and the odd rank
  /// out. 0 turns it off. Every rank must call it.
  void check_divergence_every(int every_n_steps);
  /// The same at once. Every rank must call it.
  void check_divergence() const;

  /// How gradients travel from the next backward on (comm_hook.h); null: the group's own reduction. The last
  /// parameter's flags and what ranks tell each other travel beside it in a small message a bucket. Of no effect in a
  /// world of one. Every rank registers an equal hook.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// The one that is registered, or null.
  [[nodiscard]] std::shared_ptr<CommHook> comm_hook() const;

  /// After a backward that reduced: scales the gradients so that their norm, over all parameters as one vector, is at
  /// most `max_norm` (TORCH_CHECK fails while gradients wait that have not been reduced); returns the norm before, as
  /// torch::nn::utils::clip_grad_norm_ does. `norm_type` > 0, or infinity. No communication: gradients are the same on
  /// every rank. A norm that is not finite leaves NaN or zeros, as there.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// What becomes of steps with infinity or NaN in a gradient, from the next backward on. Costs one pass over the
  /// gradients and a message of 8 bytes. Every rank must say the same.
  void set_non_finite_policy(NonFinitePolicy policy);
  /// Steps of which no rank has a gradient: skipped by NonFinitePolicy::kSkip, or by skip_step() on all ranks.
  int64_t skipped_steps() const;

  /// What reductions have cost so far.
  [[nodiscard]] ReductionStats stats() const;
  /// Let ranks tell each other after each reduction how long they waited, 8 bytes, so that stats() can say which rank
  /// is late. Every rank must call it.
  void set_rank_comparison(bool on);
  /// Tells `observer` the times of each reduction from now on; null: nobody.
  void set_observer(std::shared_ptr<Observer> observer);

  /// Seconds this rank has stood still for communication so far: the part that did not hide behind backward.
  double communication_seconds() const;
  /// Names of the parameters of each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> bucket_parameters() const;

 protected:
  /// Throws if the group is gone, or, on all ranks, if the module was edited without refresh().
  void before_forward();
  void check_not_moved_from() const { (void)*state_; }

 private:
  struct State;
  explicit Replica(std::unique_ptr<State> state);

  /// Its State, which TORCH_CHECK misses once the Replica was moved from.
  class Owner {
   public:
    explicit Owner(std::unique_ptr<State> state);
    Owner(Owner&&) noexcept;
    ~Owner();
    State& operator*() const;
    State* operator->() const { return &**this; }

   private:
    std::unique_ptr<State> state_;
  };
  Owner state_;
};

}  // namespace lockstep
