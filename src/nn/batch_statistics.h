#pragma once

#include <memory>
#include <optional>

#include <ATen/core/Tensor.h>

#include "nn/statistics_exchange.h"

namespace lockstep {

/// What batch norm is given, besides its input [batch, channels, ...]; each tensor may be undefined.
struct BatchNormArguments {
  at::Tensor weight, bias, running_mean, running_var;
  double momentum, eps;
};

/// What backward needs of the forward, float, or double for a double input.
struct BatchStatistics {
  at::Tensor mean, invstd;  ///< [channels], over all ranks
  double count;             ///< values a channel, over all ranks
};

struct Normalized {
  at::Tensor output;
  BatchStatistics statistics;
};

/// Batch norm in training over the batches of all ranks; autograd does not see it. One message.
Normalized normalize(const at::Tensor& input, const BatchNormArguments& arguments, StatisticsExchange& exchange);

struct BatchNormGradients {
  at::Tensor input;         ///< the gradient of the sum of all ranks' losses
  at::Tensor weight, bias;  ///< those of this rank's loss alone: DistributedDataParallel adds them up
};

/// Its backward. `weight` may be undefined. One message.
BatchNormGradients differentiate(const at::Tensor& grad_output, const at::Tensor& input, const at::Tensor& weight,
                                 const BatchStatistics& statistics, StatisticsExchange& exchange);

/// normalize(), recorded for autograd.
at::Tensor sync_batch_norm(const at::Tensor& input, const BatchNormArguments& arguments,
                           const std::shared_ptr<StatisticsExchange>& exchange);

}  // namespace lockstep
