#pragma once

#include <memory>
#include <string>

#include <torch/torch.h>

namespace lockstep::bench {

/// A model under test; step_worker.py has the same ones, with the same weights and batches.
struct Model : torch::nn::Module {
  virtual at::Tensor loss(const at::Tensor& data, const at::Tensor& target) = 0;
};

/// mlp: 784-2048-2048-10, batch 64. resnet: stem and three stages of two blocks, 32, 64 and 128 channels, images of
/// 28x28, batch 64. transformer: 6 layers of width 256, 4 x 64 tokens of 1000. small_1000: 1000 parameters of 64
/// floats; small_10000: 10000. linear_100m: 24 matrices of 2048 x 2048. gpt_24: a transformer with causal attention, 24
/// layers of width 592, which are units of 4.2 million parameters, 4 x 16 tokens of 1000. For GPUs: resnet18, with
/// shortcuts that have no norm, 64 images of 224x224; gpt, the transformer with causal attention, 32 x 256 tokens.
/// Weights are formulas of their place. Throws std::invalid_argument.
std::shared_ptr<Model> make_model(const std::string& name);

struct Batch {
  at::Tensor data, target;
};
/// One rank's share; every rank has another.
Batch make_batch(const std::string& model, int rank);
/// Those of ranks 0 to ranks - 1 as one.
Batch make_whole_batch(const std::string& model, int ranks);

}  // namespace lockstep::bench
