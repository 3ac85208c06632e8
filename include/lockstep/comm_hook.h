#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/state_dict.h>

namespace lockstep {

/// The gradients of several parameters, about to become the mean over the ranks.
struct GradientBucket {
  int64_t index;                  ///< buckets are reduced in this order, the same on every rank and in every step
  bool last;                      ///< of the step
  ReduceOp op;                    ///< the requested result: kMean, or kSum (of gradients that the caller has weighted)
  at::Tensor gradients;           ///< [elements], all side by side; zeros in the gaps that align them
  std::vector<at::Tensor> parts;  ///< the gradient of each parameter, with its shape: pieces of `gradients`
};

/// Replaces the all-reduce of gradients: DistributedDataParallel hands every full bucket to its hook. To write your
/// own:
///
///     struct InHalf : lockstep::CommHook {
///       Finish reduce(const lockstep::GradientBucket& bucket, const lockstep::Group& group) override {
///         at::Tensor half = bucket.gradients.to(at::kHalf);
///         lockstep::Work work = group.all_reduce_async(half, bucket.op);
///         return [=] { work.wait(), bucket.gradients.copy_(half); };
///       }
///     };
///     model.register_comm_hook(std::make_shared<InHalf>());
///
/// Every rank must register an equal hook. Both functions run outside autograd, under the reducer's lock. If one throws
/// on some rank, backward throws an Error on all ranks. Backward also throws if reduce() returns no function, or if
/// `gradients` or one of `parts` ends up with another size or other memory.
class CommHook {
 public:
  using Finish = std::function<void()>;

  virtual ~CommHook() = default;

  /// Called during backward, bucket by bucket. Starts operations and returns at once. The Finish is called when
  /// backward has computed everything, again in bucket order: it waits, and leaves the same result in `gradients` on
  /// every rank. It may start more operations and wait for them; every rank must then call the group in the same order.
  virtual Finish reduce(const GradientBucket& bucket, const Group& group) = 0;

  /// The hook's options as lines, such as "random_seed 3". register_comm_hook() compares them, so that hooks that do
  /// not match are an Error on all ranks. Options that are left out are not compared.
  virtual std::string describe() const { return {}; }

  /// For virtual ranks (docs/exactness.md): the type in which a gradient of `type` is sent, if all that this hook does
  /// is round every rank's gradient to that type before it is added. None: the hook cannot be used with virtual ranks.
  virtual std::optional<at::ScalarType> travels_as(at::ScalarType) const { return std::nullopt; }

  /// The state that the hook keeps from step to step, which Checkpointer::add saves and resumes. Error feedback belongs
  /// to one rank and one bucket, so every rank's state is saved, and it must be loaded with the same buckets.
  virtual StateDict state_dict() const { return StateDict(); }
  /// The reverse. Throws Error for unknown names.
  virtual void load_state_dict(const StateDict& state);
  /// As above, from the states of a different number of ranks, in rank order; every rank gets all of them. Tensors
  /// whose names start with "error" are averaged, so that the mean of the gradients still receives the missing part;
  /// everything else is taken from rank 0. Override this in a hook that names its tensors differently.
  virtual void load_from_ranks(const std::vector<StateDict>& ranks);
};

using CommHookPtr = std::shared_ptr<CommHook>;

/// Sums as without a hook.
[[nodiscard]] CommHookPtr all_reduce_hook();

/// Gradients are sent as float16 or bfloat16 (on CPUs, too). `inner`, if given, works on these: wrappers compose.
/// Without `inner`, gradients are divided by the world size first, so that sums do not overflow.
[[nodiscard]] CommHookPtr fp16_compress_hook(CommHookPtr inner = nullptr);
[[nodiscard]] CommHookPtr bf16_compress_hook(CommHookPtr inner = nullptr);

/// Names and meanings are PyTorch's PowerSGDState's.
struct PowerSgdOptions {
  int64_t matrix_approximation_rank = 1;
  int64_t start_iter = 1000;        ///< steps of plain all-reduce before; PyTorch's start_powerSGD_iter
  double min_compression_rate = 2;  ///< a matrix n x m is compressed if (n + m) * rank * this < n * m
  bool use_error_feedback = true;   ///< the compression error is added to the next step's gradient
  bool warm_start = true;           ///< begin with the last step's approximation
  double orthogonalization_epsilon = 0;
  uint64_t random_seed = 0;
};
/// Each gradient, seen as a matrix M [size(0), the rest], becomes a low-rank product P Q^T: P = orthogonal basis of
/// sum_r M_r Q, then Q = mean_r M_r^T P (Vogels, Karimireddy, Jaggi: PowerSGD, NeurIPS 2019, algorithm 1). A column of
/// zeros stays zero, where PyTorch gets NaN.
[[nodiscard]] CommHookPtr power_sgd_hook(const PowerSgdOptions& options = {});

struct TopKOptions {
  double density = 0.01;           ///< share of a bucket's elements that is sent, largest first; at least one element
  int64_t start_iter = 0;          ///< steps of plain all-reduce before
  bool use_error_feedback = true;  ///< the part that was not sent is added to the next step's gradient
};
/// Every rank sends its largest elements and their positions; elements that no rank sent become 0.
[[nodiscard]] CommHookPtr top_k_hook(const TopKOptions& options = {});

/// `inner` works only on the part between machines. The ranks of a machine add their gradients exactly, in shared
/// memory; `inner` sees these sums as if each machine were one rank; and its result goes to all ranks of the machine.
/// On one machine this is all_reduce_hook(); with one rank on each machine it is `inner`.
[[nodiscard]] CommHookPtr between_machines_hook(CommHookPtr inner);

struct PostLocalSgdOptions {
  int64_t start_iter = 1000;        ///< steps of plain all-reduce before; PyTorch's start_localSGD_iter
  std::optional<Group> subgroup{};  ///< ranks that keep averaging gradients among themselves; unset: none
};
/// After `start_iter` steps gradients stay on each rank (or within its subgroup), and a PeriodicModelAverager averages
/// parameters instead.
[[nodiscard]] CommHookPtr post_local_sgd_hook(PostLocalSgdOptions options = {});

/// Averages parameters over the group after every `period`-th optimizer step, from step `warmup_steps` on.
class PeriodicModelAverager {
 public:
  /// `period` >= 1, `warmup_steps` >= 0: the hook's start_iter.
  PeriodicModelAverager(Group group, int64_t period, int64_t warmup_steps = 0);
  /// Call it after each optimizer.step(), on every rank. Returns true if parameters were averaged.
  bool average_parameters(const std::vector<at::Tensor>& parameters);
  /// Steps so far.
  int64_t step() const { return step_; }
  void set_step(int64_t step) { step_ = step; }
  /// As above, for Checkpointer::add.
  StateDict state_dict() const;
  void load_state_dict(const StateDict& state);

 private:
  Group group_;
  int64_t period_;
  int64_t warmup_steps_;
  int64_t step_ = 0;
};

}  // namespace lockstep
