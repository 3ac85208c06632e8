#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/gradient_reduction.h>

namespace lockstep {

/// How buffers, such as the running statistics of batch norm, are treated after each reduction of gradients.
enum class BufferPolicy {
  kFollowRankZero,  ///< every rank takes rank 0's
  kMean,            ///< floating point buffers become the mean over the ranks; the others follow rank 0
  kNone,            ///< every rank keeps its own
};

/// All ranks must use the same values, except where an option says otherwise. Options that PyTorch has keep their
/// PyTorch names; docs/distributed_data_parallel.md lists PyTorch's other options.
struct DistributedDataParallelOptions {
  /// Gradients are reduced in messages of about this size, in MiB of 2^20 bytes. The first one is small, so that
  /// communication starts while backward still runs.
  double first_bucket_cap_mb = 1;
  double bucket_cap_mb = 25;
  GradientReduction reduction = GradientReduction::kMean;
  BufferPolicy buffers = BufferPolicy::kFollowRankZero;
  /// Set parameters and buffers to rank 0's when attaching. False: the caller guarantees that they are equal on all
  /// ranks.
  bool init_sync = true;
  /// These parameters are reduced last, whatever their place in the module.
  std::vector<std::string> delay_all_reduce_named_params{};
  /// Parameters and buffers to ignore: they are not compared, broadcast or reduced. Attaching throws Error on all ranks
  /// if a name does not exist.
  std::vector<std::string> parameters_to_ignore{};
  /// Keep the memory of freed CPU tensors for the next ones, so that no step waits for fresh pages. Applies to the
  /// whole process until the last object with this option is destroyed. Never overrides malloc's variables, a malloc
  /// other than glibc's, or a CPU allocator set by the user (docs/step.md). Ranks may differ.
  bool keep_freed_memory = true;
  /// Accepted for compatibility with PyTorch, without effect. Unused parameters and static or changing graphs need no
  /// option here. Gradients always share memory with their bucket: gradient_as_bucket_view = false is refused, so clone
  /// gradients that you want to keep.
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool skip_all_reduce_unused_params = false;
};

struct DivergenceOptions {
  /// Compare buffers as each rank has left them, before they follow rank 0. For buffers that every rank computes from
  /// the same numbers, such as a running normaliser of observations. Batch norm's statistics are only compared
  /// afterwards.
  bool buffers_as_left = false;
};

struct JoinOptions {
  /// Divide the mean by the world size, so that each input has the same weight even after ranks have run out. False:
  /// divide by the number of ranks that still have inputs. No effect on sums and weighted means.
  bool divide_by_initial_world_size = true;
  /// Throw Error on all ranks as soon as one has run out, instead of going on without it.
  bool throw_on_early_termination = false;
  /// False: only run the body.
  /// REQUIRES: all ranks have the same number of inputs.
  bool enable = true;
  /// Runs on a rank that has run out, after each reduction of the others. Match the others' collectives (metrics) here,
  /// and call the optimizer's step, so that its state follows theirs.
  std::function<void()> shadow{};
};

}  // namespace lockstep
