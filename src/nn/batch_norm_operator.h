#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "nn/statistics_exchange.h"

namespace lockstep {

/// A layer whose calls of torch's batch norm are synchronised.
struct SynchronizedLayer {
  std::shared_ptr<LayerExchange> exchange;  ///< null: its group is closed
  /// Whether it is in training. Null: its forward does not call torch's batch norm; it is only registered.
  std::function<bool()> is_training;
};

/// From now on, while the layer is in training, a call of torch's batch norm (CPU and CUDA) with `tensor` as running
/// mean or weight takes its statistics over all ranks, for as long as the tensor exists. Replaces an earlier call for
/// the same tensor.
void synchronize_calls_with(const at::Tensor& tensor, SynchronizedLayer layer);

/// The exchange of the layers over `group`, or null if none. TORCH_CHECK fails if there are layers over another group,
/// because a rank that has run out of inputs could not serve them.
std::shared_ptr<StatisticsExchange> exchange_within_join(const Group& group);

/// Releases closed groups: from now on, forward of their layers in training fails.
void forget_closed_groups();

/// Whether a synchronised layer has this tensor as its running mean or weight.
bool is_synchronized(const at::Tensor& tensor);

}  // namespace lockstep
