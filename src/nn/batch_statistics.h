#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "nn/statistics_exchange.h"

namespace lockstep {

/// The arguments of batch norm besides its input [batch, channels, ...]; each tensor may be undefined.
struct BatchNormArguments {
  at::Tensor weight, bias, running_mean, running_var;
  double momentum, eps;
};

/// Values that backward needs from forward: float, or double for a double input.
struct BatchStatistics {
  at::Tensor mean, invstd;  ///< [channels], over all ranks
  double count;             ///< values per channel, over all ranks
};

struct Normalized {
  at::Tensor output;
  BatchStatistics statistics;
};

/// Batch norm in training over the batches of all ranks, not recorded by autograd. Sends one message.
Normalized normalize(const at::Tensor& input, const BatchNormArguments& arguments, const LayerExchange& layer);

struct BatchNormGradients {
  at::Tensor input;         ///< the gradient of the sum of all ranks' losses
  at::Tensor weight, bias;  ///< gradients of this rank's loss only; DistributedDataParallel reduces them
};

/// The backward of normalize(). `weight` may be undefined. Sends one message.
BatchNormGradients differentiate(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                 const BatchStatistics& statistics, const LayerExchange& layer);

/// normalize(), recorded for autograd.
at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormArguments& arguments,
                           const std::shared_ptr<LayerExchange>& layer);

}  // namespace lockstep
