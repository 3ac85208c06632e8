#pragma once

#include <ATen/core/Tensor.h>

#include "collectives/gloo/messages.h"
#include "collectives/shm/kernels/reduce.h"

namespace lockstep::gloo_engine {

/// A reduction whose ranks add with the kernels and the tree of shared memory, for the same bits.
struct TreeReduction {
  enum class Kind { kAllReduce, kReduce, kReduceScatter };

  Kind kind;
  int rank = 0, world_size = 0;
  int root = 0;  ///< kReduce
  shm::ReduceFunction kernel = nullptr;
  at::Tensor input;   ///< contiguous; in kReduce the other ranks' tensors are overwritten
  at::Tensor output;  ///< `input` itself, except for kReduceScatter
};

/// Returns when this rank's part is done; throws what a message's wait() throws.
void run(const TreeReduction& task, const Messages& messages);

}  // namespace lockstep::gloo_engine
