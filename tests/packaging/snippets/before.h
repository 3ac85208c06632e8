// What blocks of the documents take for granted: snippets_test.py puts it before them.
#pragma once

#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images) { return out(torch::relu(first(images.flatten(1)))); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(28 * 28, 10))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(10, 10))};
};
TORCH_MODULE(Net);

namespace before {

/// With the layers that convert_sync_batchnorm is there for.
struct NormedNetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor images) { return out(norm(first(images.flatten(1)))); }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(28 * 28, 10))};
  torch::nn::BatchNorm1d norm{register_module("norm", torch::nn::BatchNorm1d(10))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(10, 10))};
};
TORCH_MODULE(NormedNet);

/// In the working folder, written by the test: 64 images for training and 32 to test.
inline lockstep::datasets::FashionMNIST images(lockstep::Split split = lockstep::kTrain) { return {"data", split}; }

inline lockstep::DataLoader loader(lockstep::Context& context) {
  return {images(), context, {.batch_size = 8, .shuffle = true}};
}

inline at::Tensor cross_entropy(const at::Tensor& scores, const at::Tensor& target) {
  return torch::nn::functional::cross_entropy(scores, target);
}

/// Sequences of one length, filled up with zeros.
inline std::map<std::string, at::Tensor> padded(const std::vector<std::map<std::string, at::Tensor>>& examples) {
  std::map<std::string, at::Tensor> batch;
  for (const auto& [name, first] : examples.front()) {
    std::vector<at::Tensor> all;
    for (const auto& example : examples) all.push_back(example.at(name));
    batch[name] = torch::nn::utils::rnn::pad_sequence(all, true);
  }
  return batch;
}

/// Fails the block whose promise in the text does not hold.
inline void holds(bool it_does, const char* what) {
  if (!it_does) throw std::runtime_error(std::string("not as the page says: ") + what);
}

}  // namespace before
