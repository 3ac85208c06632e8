#pragma once

#include <cmath>
#include <string>

#include <torch/torch.h>

// The models and inputs of tests/golden/write_ddp_golden.py.

namespace lockstep::testing {

/// Values in (-0.5, 0.5), equal in every language.
inline at::Tensor formula(at::IntArrayRef shape, double key) {
  at::Tensor values = at::empty(shape, at::kDouble);
  double* data = values.data_ptr<double>();
  for (int64_t i = 0; i < values.numel(); ++i) {
    const double value = static_cast<double>(i) * 0.6180339887498949 + key * 0.3771;
    data[i] = value - std::floor(value) - 0.5;
  }
  return values;
}

inline void fill(torch::nn::Module& module) {
  at::NoGradGuard no_grad;
  int key = 0;
  for (auto& parameter : module.parameters()) parameter.copy_(formula(parameter.sizes(), ++key));
}

struct Sample {
  at::Tensor data, target;
};

inline Sample batch(int step, int rank, at::ScalarType dtype = at::kFloat, int64_t size = 4) {
  const double key = 1000 + step * 10 + rank;
  return {formula({size, 6}, key).to(dtype), formula({size, 3}, key + 0.5).to(dtype)};
}

/// A model whose forward may depend on the step and the rank.
struct Model : torch::nn::Module {
  virtual at::Tensor forward(const at::Tensor& x, int step, int rank) = 0;
};

struct Plain : Model {
  at::Tensor forward(const at::Tensor& x, int, int) override { return fc2(torch::tanh(fc1(x))); }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(6, 8))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(8, 3))};
};

struct WithBatchNorm : Model {
  at::Tensor forward(const at::Tensor& x, int, int) override { return fc2(torch::relu(bn(fc1(x)))); }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(6, 8))};
  torch::nn::BatchNorm1d bn{register_module("bn", torch::nn::BatchNorm1d(8))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(8, 3))};
};

struct Branches : Model {
  at::Tensor forward(const at::Tensor& x, int step, int rank) override {
    return (step + rank) % 2 == 0 ? left(x) : right(x);
  }
  torch::nn::Linear left{register_module("left", torch::nn::Linear(6, 3))};
  torch::nn::Linear right{register_module("right", torch::nn::Linear(6, 3))};
  torch::nn::Linear never{register_module("never", torch::nn::Linear(6, 3))};
};

struct Shared : Model {
  at::Tensor forward(const at::Tensor& x, int, int) override { return out(torch::tanh(fc(torch::tanh(fc(x))))); }
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(6, 6))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(6, 3))};
};

inline std::shared_ptr<Model> make_model(const std::string& name) {
  std::shared_ptr<Model> model;
  if (name == "batch_norm") model = std::make_shared<WithBatchNorm>();
  if (name == "branches") model = std::make_shared<Branches>();
  if (name == "shared") model = std::make_shared<Shared>();
  if (!model) model = std::make_shared<Plain>();
  fill(*model);
  return model;
}

inline torch::optim::SGD make_sgd(Model& model) {
  return torch::optim::SGD(model.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
}

inline at::Tensor loss_of(Model& model, const Sample& sample, int step, int rank) {
  return torch::mse_loss(model.forward(sample.data, step, rank), sample.target);
}

}  // namespace lockstep::testing
