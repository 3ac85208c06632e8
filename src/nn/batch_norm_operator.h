#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>

#include "nn/statistics_exchange.h"

namespace lockstep {

/// A layer whose calls of torch's batch norm are synchronised.
struct SynchronizedLayer {
  std::shared_ptr<StatisticsExchange> exchange;  ///< null: its group is closed
  /// Whether it is in training. Null: its forward takes no such way; it is only known.
  std::function<bool()> is_training;
};

/// From now on torch's batch norm (CPU and CUDA), given `tensor` as running mean or weight while the layer is in
/// training, takes its statistics over all ranks. Until the tensor goes; what was said of it before is forgotten.
void synchronize_calls_with(const at::Tensor& tensor, SynchronizedLayer layer);

/// What layers over `group` exchange, or null if there are none. TORCH_CHECK fails if there are layers over another
/// group, which a rank that has run out of inputs could not serve.
std::shared_ptr<StatisticsExchange> exchange_within_join(const Group& group);

/// Lets go of groups that are closed: forward of their layers in training fails from now on.
void forget_closed_groups();

/// Whether a synchronised layer has this tensor as its running mean or weight.
bool is_synchronized(const at::Tensor& tensor);

}  // namespace lockstep
