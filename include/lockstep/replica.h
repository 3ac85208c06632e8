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
class Replica;
namespace detail {
/// The ranks that have a replica, by their numbers among all ranks.
std::vector<int> ranks_of_replicas(const Replica& model);
}  // namespace detail

/// DistributedDataParallel without the type of the module. Call methods on the thread that made the object, between
/// backward passes. Every rank must call the methods whose comments say so.
class Replica {
 public:
  Replica(std::shared_ptr<torch::nn::Module> module, const Group& group, DistributedDataParallelOptions options = {});
  Replica(const torch::jit::Module& module, const Group& group, DistributedDataParallelOptions options = {});
  Replica(NamedTensors parameters, const Group& group, DistributedDataParallelOptions options = {});
  ~Replica();
  Replica(Replica&&) noexcept;
  Replica& operator=(Replica&&) = delete;

  [[nodiscard]] NoSyncGuard no_sync();
  /// `n` >= 1. Divide the loss by n to get the mean over the n passes. If the data ends early, the next backward that
  /// reduces, or reduce_gradients(), reduces the rest.
  [[nodiscard]] Accumulation accumulate(int n);
  /// The `n` of the last accumulate(n); 0 before the first.
  int last_accumulation() const;
  /// Whether the last backward reduced gradients, so that optimizer.step() and zero_grad() are due. False after a
  /// backward that no_sync() or accumulate() kept local and, if this rank works for several virtual ranks, until all of
  /// them have run theirs.
  [[nodiscard]] bool step_complete() const;
  /// Reduces the gradients that no_sync() or accumulate() left in .grad, without a backward. A rank that has run no
  /// backward since the last reduction takes part with zeros, and the mean counts it. Every rank must call it, or run a
  /// backward that reduces.
  void reduce_gradients();
  /// Leaves this rank's share out of a step, for example because its batch is bad:
  ///
  ///     try {
  ///       loss_of(model(data)).backward();
  ///     } catch (const BadBatch&) {
  ///       model.skip_step();
  ///     }
  ///     optimizer.step();
  ///
  /// It replaces the backward that failed or was not run, and takes part in the others' next reduction. Every rank,
  /// including this one, gets the mean (or sum) over the ranks that did not skip. This rank's gradients since the last
  /// reduction are dropped; with accumulate(n) these are all passes so far, and the remaining ones must not be run.
  ///
  /// There is no step if all ranks skip, or if this rank's backward failed after one of its buckets was sent, which
  /// cannot be undone. .grad is then undefined on all ranks, optimizer.step() changes nothing, and skipped_steps()
  /// counts it. Buckets are sent early only if there are several; a first_bucket_cap_mb above the size of the model
  /// makes a single one.
  void skip_step();
  /// For GradientReduction::kWeightedMean: the weight (samples, tokens) of this rank's gradients in future reductions.
  /// 1 until set; 0 for a rank without samples. Each rank sets its own.
  void set_weight(double weight);

  /// Runs `body`, a loop over inputs of which some ranks may have fewer. A rank whose body has returned takes part in
  /// the others' reductions, without a gradient, until all have returned. Every rank then gets the parameters and
  /// buffers of the last rank that had inputs. Every rank must call it.
  /// REQUIRES: `body` has one reduction between two calls of zero_grad().
  void join(const std::function<void()>& body, const JoinOptions& options = {});

  /// Sets every parameter and buffer to rank `root`'s. Every rank must call it.
  void broadcast_parameters(int root = 0);
  /// Sets every parameter and every floating-point buffer to the mean over the ranks, weighted by each rank's `weight`;
  /// other buffers follow rank 0. Every rank must call it, each with its own weight.
  void average_parameters(double weight = 1);
  /// Call it after adding, replacing or removing layers, or freezing or unfreezing parameters: it attaches to the
  /// module as it is now. New parameters and buffers are compared across ranks and set to rank 0's; the others stay as
  /// they are on each rank. Add new parameters to the optimizer yourself: a warning on rank 0 names those that have not
  /// changed ten reductions after their first gradient. Every rank must call it. If it throws (the ranks' modules
  /// differ, and the Error names the first difference; a rank is out of memory), it throws on all ranks, and the object
  /// stays attached to what it had before.
  void refresh();
  /// As above, for a list of parameters that replaces the old one. No name and no tensor may occur twice.
  void refresh(NamedTensors parameters);

  /// In every n-th reduction, compares all parameters, and buffers unless each rank keeps its own, bit by bit, with
  /// hashes in one small message. The Error on all ranks names the tensor and the odd rank out. Buffers are compared
  /// after they have followed rank 0, those that the options name also before. With a ZeroRedundancyOptimizer that
  /// takes the mean itself, parameters are compared before its step, buffers at its end. 0 turns comparison off. Every
  /// rank must call it.
  void check_divergence_every(int every_n_steps, const DivergenceOptions& options = {});
  /// Compares now. Every rank must call it.
  void check_divergence() const;
  /// As in the options.
  const std::vector<std::string>& parameters_to_ignore() const;

  /// Sets how gradients are reduced from the next backward on (comm_hook.h). Null: by the group itself. Flags of unused
  /// parameters and what ranks tell each other travel separately, in a small message per bucket. No effect with a
  /// single rank. Every rank must register an equal hook: types and describe() are compared, and a difference is an
  /// Error on all ranks.
  void register_comm_hook(std::shared_ptr<CommHook> hook);
  /// The registered hook, or null.
  [[nodiscard]] std::shared_ptr<CommHook> comm_hook() const;

  /// Scales the gradients so that their norm, over all parameters as one vector, is at most `max_norm`. Returns the
  /// norm before scaling, as torch::nn::utils::clip_grad_norm_ does. `norm_type` > 0, or infinity. Call it after a
  /// backward that reduced: TORCH_CHECK fails while unreduced gradients wait. Does not communicate: gradients are equal
  /// on every rank. A norm that is not finite leaves NaN or zeros, as in LibTorch.
  ///
  /// With an optimizer that sums gradients itself (zero_redundancy_optimizer.h), every rank must call it with the same
  /// arguments, and waits for the others. It then leaves no .grad, and frozen parameters do not count.
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// Sets how steps with infinity or NaN in a gradient are treated, from the next backward on. Costs one pass over the
  /// gradients and a message of 8 bytes. Every rank must set the same policy.
  void set_non_finite_policy(NonFinitePolicy policy);
  /// Steps without a gradient on any rank: skipped by NonFinitePolicy::kSkip, or by skip_step() on all ranks.
  int64_t skipped_steps() const;

  /// The costs of reductions so far.
  [[nodiscard]] ReductionStats stats() const;
  /// Makes ranks tell each other after each reduction how long they waited (8 bytes), so that stats() can name the rank
  /// that is late. Every rank must call it.
  void set_rank_comparison(bool on);
  /// Reports the times of each reduction to `observer` from now on. Null: stops reporting.
  void set_observer(std::shared_ptr<Observer> observer);

  /// Seconds that this rank has waited for communication so far: the part not hidden behind backward.
  double communication_seconds() const;
  /// Names of the parameters in each bucket, in the order in which buckets are reduced.
  std::vector<std::vector<std::string>> bucket_parameters() const;

 protected:
  struct State;
  explicit Replica(std::unique_ptr<State> state);
  /// Throws if the group is gone or, on all ranks, if the module was edited without refresh().
  void before_forward();
  void check_not_moved_from() const { (void)*state_; }
  /// The derived object keeps this list. Its handles count as no user's until it is handed out.
  void keeps_list(const NamedTensors& list) const;
  void hands_out_list() const;

 private:
  friend State& state_of(const Replica& replica);

  /// The State; TORCH_CHECK fails if the Replica was moved from.
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
