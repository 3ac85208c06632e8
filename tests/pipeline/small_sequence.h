#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <torch/nn/functional/loss.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

namespace lockstep::testing {

/// From tokens [n, 5] to scores [n, 5, 7]: six layers, of which the first takes integers and one has no parameters.
inline torch::nn::Sequential small_sequence() {
  return torch::nn::Sequential(torch::nn::Embedding(11, 8), torch::nn::Linear(8, 16), torch::nn::GELU(),
                               torch::nn::Linear(16, 12), torch::nn::LayerNorm(torch::nn::LayerNormOptions({12})),
                               torch::nn::Linear(12, 7));
}

/// Tokens and targets of a pipeline's batch.
struct SmallBatch {
  at::Tensor data, target;
};
inline SmallBatch small_batch(int step, int pipeline, int64_t rows) {
  const int64_t count = rows * 5;
  const at::Tensor numbers = at::arange(count, at::kLong) * (2 * step + 3) + 5 * pipeline + step;
  return {(numbers * numbers).remainder(11).view({rows, 5}), (numbers * 3).remainder(7).view({rows, 5})};
}

inline at::Tensor small_loss(const at::Tensor& scores, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(scores.reshape({-1, 7}), target.reshape(-1));
}

}  // namespace lockstep::testing
