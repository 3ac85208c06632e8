#pragma once

#include <lockstep/fully_sharded_data_parallel.h>
#include <torch/torch.h>

#include "support/ranks.h"

namespace lockstep::testing {

/// Two layers and a residual; one of its parameters is frozen.
struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t width) {
    register_module("norm", norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    register_module("in", in = torch::nn::Linear(width, 3 * width));
    register_module("out", out = torch::nn::Linear(3 * width, width));
    frozen = register_parameter("frozen", torch::rand({width}), /*requires_grad=*/false);
  }
  at::Tensor forward(const at::Tensor& x) { return x + out(torch::gelu(in(norm(x)))) * frozen; }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
  at::Tensor frozen;
};
TORCH_MODULE(Block);

/// An embedding, layers and a head. Every third step leaves out the layer in the middle.
struct SmallGptImpl : torch::nn::Module {
  static constexpr int64_t kWidth = 24, kLength = 5;

  explicit SmallGptImpl(int count) {
    torch::manual_seed(3);
    register_module("tokens", tokens = torch::nn::Embedding(7, kWidth));
    for (int i = 0; i < count; ++i) layers->push_back(ShardedUnit<Block>(kWidth));
    register_module("layers", layers);
    register_module("head", head = torch::nn::Linear(kWidth, 7));
  }
  at::Tensor forward(const at::Tensor& text, int step = 0) {
    at::Tensor x = tokens(text);
    for (size_t i = 0; i < layers->size(); ++i)
      if (step % 3 != 2 || i != layers->size() / 2) x = layers->at<detail::Unit<BlockImpl>>(i).forward(x);
    return head(x);
  }
  torch::nn::Embedding tokens{nullptr};
  torch::nn::Sequential layers;
  torch::nn::Linear head{nullptr};
};
TORCH_MODULE(SmallGpt);

/// Where what one rank does wrong is told to all.
inline const Engine kTellingEngines[] = {{2, "shm"},
                                         {3, "shm"},
                                         {2, "gloo"},
                                         {2, "hierarchical", "ab"},
                                         {3, "hierarchical", "abc"},
                                         {4, "hierarchical", "aabb"}};

/// With one thread on each rank: with several, LibTorch's operators have other bits.
inline void run_alike(const Engine& engine, const std::function<void(Context&)>& body) {
  run_ranks(engine.world_size, body, std::chrono::seconds(60),
            {.threads = 1, .backend = engine.backend, .announce = false}, engine.machines);
}

inline at::Tensor text_of(int step, int rank) {
  return (at::arange(3 * SmallGptImpl::kLength) * (rank + 2) + step).remainder(7).view({3, SmallGptImpl::kLength});
}

inline at::Tensor loss_of(const at::Tensor& scores, const at::Tensor& text) {
  return torch::nn::functional::cross_entropy(scores.view({-1, 7}), (text + 1).remainder(7).view(-1));
}

}  // namespace lockstep::testing
