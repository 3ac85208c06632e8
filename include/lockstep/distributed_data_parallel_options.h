#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/gradient_reduction.h>

namespace lockstep {

/// The treatment of buffers (such as the running statistics of batch norm) after each reduction of gradients.
enum class BufferPolicy {
  kFollowRankZero,  ///< every rank takes rank 0's
  kMean,            ///< floating point buffers become the mean over the ranks; the others follow rank 0
  kNone,            ///< every rank keeps its own
};

/// All ranks must use the same values, except where an option says otherwise. Options that PyTorch has keep its names;
/// docs/distributed_data_parallel.md says what became of PyTorch's others.
struct DistributedDataParallelOptions {
  /// Gradients are reduced in messages of about this size, MiB of 2^20 bytes. The first one is small, so that
  /// communication starts while backward still runs.
  double first_bucket_cap_mb = 1;
  double bucket_cap_mb = 25;
  GradientReduction reduction = GradientReduction::kMean;
  BufferPolicy buffers = BufferPolicy::kFollowRankZero;
  /// Set parameters and buffers to rank 0's when attaching. False: you guarantee that all ranks hold the same.
  bool init_sync = true;
  /// These parameters are reduced last, whatever their place in the module.
  std::vector<std::string> delay_all_reduce_named_params{};
  /// Parameters and buffers to leave alone: they are not compared, broadcast or reduced. Attaching throws an Error on
  /// all ranks if there is none of such a name.
  std::vector<std::string> parameters_to_ignore{};
  /// Keep the memory of freed CPU tensors for the next ones, so that no step waits for fresh pages: in the whole
  /// process, until the last object with this option is destroyed. Never overrides malloc's variables, a malloc other
  /// than glibc's, or a CPU allocator set by the user (docs/step.md). Ranks may differ.
  bool keep_freed_memory = true;
  /// Accepted for compatibility with PyTorch, without effect. Unused parameters and static or changing graphs need no
  /// option here, and gradients always share memory with their bucket (false is refused: clone gradients that you want
  /// to keep).
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool skip_all_reduce_unused_params = false;
};

struct DivergenceOptions {
  /// Compare buffers as each rank has left them, before they follow rank 0: those that every rank computes from the
  /// same numbers, such as a running normaliser of observations. Batch norm's statistics are compared afterwards only.
  bool buffers_as_left = false;
};

struct JoinOptions {
  /// The mean divides by the world size, so that each input has the same weight whichever rank has run out. False: it
  /// divides by the number of ranks that still have inputs. No effect on sums and weighted means.
  bool divide_by_initial_world_size = true;
  /// End with an Error on all ranks as soon as one has run out, instead of going on without it.
  bool throw_on_early_termination = false;
  /// False: only run the body; all ranks have the same number of inputs.
  bool enable = true;
  /// Runs on a rank that has run out, after each reduction of the others. Match their other collectives (metrics) here,
  /// and call the optimizer's step, so that its state follows theirs.
  std::function<void()> shadow{};
};

}  // namespace lockstep
