#pragma once

#include <cstdint>
#include <vector>

namespace lockstep {

/// The next action of a stage.
struct PipelineAction {
  enum class Kind { kForward, kBackward };
  Kind kind;
  int micro_batch;
  bool operator==(const PipelineAction&) const = default;
};

/// The order of a stage's work on a batch, "one forward, one backward" (Narayanan et al., "Efficient Large-Scale
/// Language Model Training on GPU Clusters Using Megatron-LM", 2021, figure 4 top): `in_flight` forwards for each later
/// stage, then a forward and a backward in turns, then the remaining backwards. With in_flight = 1 a micro-batch's
/// gradient arrives in time if tensors take no time between stages; with 2 they may take as long as a stage's work on
/// one micro-batch.
std::vector<PipelineAction> one_forward_one_backward(int stage, int stages, int micro_batches, int in_flight);

/// The number of samples of each micro-batch: as equal as possible, larger ones first.
std::vector<int64_t> rows_of_micro_batches(int64_t rows, int micro_batches);

}  // namespace lockstep
