#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "collectives/gloo/messages.h"

namespace lockstep::gloo_engine {

/// An all_to_all whose ranks give splits. Gloo's own believes any split: it writes past the memory that a rank expects
/// to fill, waits, or ends the process.
struct UnevenExchange {
  int rank = 0, world_size = 0;
  at::Tensor input, output;             ///< bytes, [all]
  std::vector<int64_t> sent, received;  ///< bytes for and from each rank
  size_t element_bytes = 1;             ///< for messages

  /// Both tensors are contiguous. Empty splits divide the rows evenly.
  static UnevenExchange of(const at::Tensor& output, const std::vector<int64_t>& output_splits, const at::Tensor& input,
                           const std::vector<int64_t>& input_splits, int rank, int world_size);
};

/// Returns when this rank's part is done. Throws RanksDiffer on all ranks if their splits do not match, and what a
/// message's wait() throws.
void run(const UnevenExchange& task, const Messages& messages);

}  // namespace lockstep::gloo_engine
