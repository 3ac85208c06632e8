#pragma once

#include <functional>
#include <string>
#include <vector>

#include <lockstep/gradient_reduction.h>

namespace lockstep {

/// What becomes of buffers (such as the running statistics of batch norm) after each reduction of gradients.
enum class BufferPolicy {
  kFollowRankZero,  ///< every rank takes rank 0's
  kMean,            ///< floating point buffers become the mean over the ranks; the others follow rank 0
  kNone,            ///< every rank keeps its own
};

/// All ranks must give the same, where it is not said. Names are PyTorch's where it has the option;
/// docs/distributed_data_parallel.md says what became of its others.
struct DistributedDataParallelOptions {
  /// Gradients are reduced in messages of about this size, MiB of 2^20 bytes. The first one is small, so that
  /// communication starts while backward still runs.
  double first_bucket_cap_mb = 1;
  double bucket_cap_mb = 25;
  GradientReduction reduction = GradientReduction::kMean;
  BufferPolicy buffers = BufferPolicy::kFollowRankZero;
  /// Set parameters and buffers to rank 0's when attaching. False: the user vouches that ranks hold the same.
  bool init_sync = true;
  /// These parameters are reduced last, whatever their place in the module.
  std::vector<std::string> delay_all_reduce_named_params;
  /// Parameters and buffers that are left alone: not compared, not broadcast, not reduced.
  std::vector<std::string> parameters_to_ignore;
  /// Keep the memory of freed CPU tensors for the next ones, so that no step waits for fresh pages: in the whole
  /// process, until the last object that says so is gone. It never overrules malloc's variables, a malloc that is not
  /// glibc's, or a CPU allocator of the user's (docs/step.md). Each rank may say otherwise.
  bool keep_freed_memory = true;
  /// Accepted for PyTorch's sake: what they ask for is so in any case. Unused parameters, a static or a changing graph
  /// need no option here, and gradients always are views of their bucket (false is refused: clone what is to be kept).
  bool find_unused_parameters = false;
  bool static_graph = false;
  bool gradient_as_bucket_view = true;
  bool skip_all_reduce_unused_params = false;
};

struct JoinOptions {
  /// The mean divides by the world size, so that each input weighs the same whichever rank ran out; false: by the ranks
  /// that still have inputs. Of no effect on sums and weighted means.
  bool divide_by_initial_world_size = true;
  /// End with an Error on all ranks as soon as one has run out, instead of going on without it.
  bool throw_on_early_termination = false;
  /// False: only run the body; all ranks have the same number of inputs.
  bool enable = true;
  /// Runs on a rank that has run out, once for each reduction of the others, after it: the place to match their other
  /// collectives (metrics) and to take the optimizer's step, which keeps its state in step.
  std::function<void()> shadow;
};

}  // namespace lockstep
