#include "models.h"

#include <cmath>
#include <optional>
#include <stdexcept>
#include <vector>

#include <lockstep/sharded_unit.h>

namespace lockstep::bench {
namespace {

namespace nn = torch::nn;

/// Values in (-0.5, 0.5): the fractional part of i * 0.618... + key * 0.377..., in double; equal in every language.
at::Tensor formula(at::IntArrayRef shape, double key) {
  const int64_t count = c10::multiply_integers(shape);
  const at::Tensor value = at::arange(count, at::kDouble) * 0.6180339887498949 + key * 0.3771;
  return (value - value.floor() - 0.5).reshape(shape);
}

/// Matrices and kernels as large as nn's defaults make them, norms 1, biases 0, scales 0.5.
void fill(nn::Module& module) {
  at::NoGradGuard no_grad;
  int key = 0;
  for (auto& item : module.named_parameters()) {
    at::Tensor& parameter = item.value();
    ++key;
    if (parameter.dim() > 1)
      parameter.copy_(formula(parameter.sizes(), key) * (2 / std::sqrt(parameter[0].numel())));
    else
      parameter.fill_(item.key().ends_with("bias") ? 0 : item.key().starts_with("scale") ? 0.5 : 1);
  }
}

struct Mlp : Model {
  at::Tensor loss(const at::Tensor& data, const at::Tensor& target) override {
    return torch::cross_entropy_loss(fc3(torch::relu(fc2(torch::relu(fc1(data))))), target);
  }
  nn::Linear fc1{register_module("fc1", nn::Linear(784, 2048))};
  nn::Linear fc2{register_module("fc2", nn::Linear(2048, 2048))};
  nn::Linear fc3{register_module("fc3", nn::Linear(2048, 10))};
};

nn::Conv2d convolution(int64_t in, int64_t out, int64_t kernel, int64_t stride) {
  return nn::Conv2d(nn::Conv2dOptions(in, out, kernel).stride(stride).padding(kernel / 2).bias(false));
}

struct BlockImpl : nn::Module {
  BlockImpl(int64_t in, int64_t out, int64_t stride)
      : conv1(register_module("conv1", convolution(in, out, 3, stride))),
        bn1(register_module("bn1", nn::BatchNorm2d(out))),
        conv2(register_module("conv2", convolution(out, out, 3, 1))),
        bn2(register_module("bn2", nn::BatchNorm2d(out))) {
    if (in != out) shortcut = register_module("shortcut", convolution(in, out, 1, stride));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor inner = bn2(conv2(torch::relu(bn1(conv1(x)))));
    return torch::relu(inner + (shortcut ? shortcut(x) : x));
  }
  nn::Conv2d conv1;
  nn::BatchNorm2d bn1;
  nn::Conv2d conv2;
  nn::BatchNorm2d bn2;
  nn::Conv2d shortcut{nullptr};
};
TORCH_MODULE(Block);

struct ResNetShape {
  int64_t channels, kernel, stride;  ///< of the stem
  bool pool;                         ///< after it
  std::vector<int64_t> widths;       ///< of the stages, which have two blocks each
  int64_t classes;
};

struct ResNet : Model {
  explicit ResNet(const ResNetShape& shape)
      : pool(shape.pool),
        conv(register_module("conv", convolution(shape.channels, shape.widths.front(), shape.kernel, shape.stride))),
        bn(register_module("bn", nn::BatchNorm2d(shape.widths.front()))),
        fc(nn::Linear(shape.widths.back(), shape.classes)) {
    int64_t in = shape.widths.front();
    for (const int64_t out : shape.widths)
      for (int i = 0; i < 2; ++i) {
        blocks->push_back(Block(in, out, in == out ? 1 : 2));
        in = out;
      }
    register_module("blocks", blocks);
    register_module("fc", fc);
  }
  at::Tensor loss(const at::Tensor& data, const at::Tensor& target) override {
    at::Tensor x = torch::relu(bn(conv(data)));
    if (pool) x = torch::max_pool2d(x, 3, 2, 1);
    for (const auto& block : *blocks) x = block->as<Block>()->forward(x);
    return torch::cross_entropy_loss(fc(x.mean({2, 3})), target);
  }
  bool pool;
  nn::Conv2d conv;
  nn::BatchNorm2d bn;
  nn::ModuleList blocks;
  nn::Linear fc;
};

struct TransformerShape {
  int64_t layers, width, heads;
  bool causal;
  int64_t batch, length;  ///< of a rank's tokens
};

constexpr int64_t kTokens = 1000;

/// That of transformer, gpt and gpt_24; null: another model.
std::optional<TransformerShape> transformer_named(const std::string& name) {
  if (name == "transformer") return TransformerShape{6, 256, 4, false, 4, 64};
  if (name == "gpt") return TransformerShape{6, 256, 4, true, 32, 256};
  if (name == "gpt_24") return TransformerShape{24, 592, 8, true, 4, 16};
  return {};
}

struct LayerImpl : nn::Module {
  explicit LayerImpl(const TransformerShape& all) : shape(all) {}
  at::Tensor forward(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), width = shape.width;
    const at::Tensor qkv =
        in(norm1(x)).view({batch, length, 3, shape.heads, width / shape.heads}).permute({2, 0, 3, 1, 4});
    const at::Tensor mixed =
        at::scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], {}, /*dropout_p=*/0, shape.causal);
    const at::Tensor y = x + out(mixed.transpose(1, 2).reshape({batch, length, width}));
    return y + fc2(torch::gelu(fc1(norm2(y))));
  }
  const TransformerShape shape;
  nn::LayerNorm norm1{register_module("norm1", nn::LayerNorm(nn::LayerNormOptions({shape.width})))};
  nn::Linear in{register_module("in", nn::Linear(shape.width, 3 * shape.width))};
  nn::Linear out{register_module("out", nn::Linear(shape.width, shape.width))};
  nn::LayerNorm norm2{register_module("norm2", nn::LayerNorm(nn::LayerNormOptions({shape.width})))};
  nn::Linear fc1{register_module("fc1", nn::Linear(shape.width, 4 * shape.width))};
  nn::Linear fc2{register_module("fc2", nn::Linear(4 * shape.width, shape.width))};
};
TORCH_MODULE(Layer);

struct Transformer : Model {
  explicit Transformer(const TransformerShape& all) : shape(all) {
    for (int i = 0; i < shape.layers; ++i) {
      units.emplace_back(shape);
      layers->push_back(units.back());
    }
  }
  at::Tensor loss(const at::Tensor& data, const at::Tensor& target) override {
    at::Tensor x = embedding(data);
    for (auto& unit : units) x = unit(x);
    return torch::cross_entropy_loss(head(norm(x)).flatten(0, 1), target.flatten());
  }
  const TransformerShape shape;
  std::vector<ShardedUnit<Layer>> units;  ///< for FullyShardedDataParallel; the layers themselves for others
  nn::Embedding embedding{register_module("embedding", nn::Embedding(kTokens, shape.width))};
  nn::ModuleList layers{register_module("layers", nn::ModuleList())};
  nn::LayerNorm norm{register_module("norm", nn::LayerNorm(nn::LayerNormOptions({shape.width})))};
  nn::Linear head{register_module("head", nn::Linear(shape.width, kTokens))};
};

struct Small : Model {
  explicit Small(int parameters) {
    for (int i = 0; i < parameters; ++i)
      scales.push_back(register_parameter("scale" + std::to_string(i), at::ones({64})));
  }
  at::Tensor loss(const at::Tensor& data, const at::Tensor&) override {
    at::Tensor x = data;
    for (const at::Tensor& scale : scales) x = x * scale + data;
    return x.mean();
  }
  std::vector<at::Tensor> scales;
};

struct Linear100m : Model {
  Linear100m() {
    for (int i = 0; i < 24; ++i) layers->push_back(nn::Linear(nn::LinearOptions(2048, 2048).bias(false)));
  }
  at::Tensor loss(const at::Tensor& data, const at::Tensor&) override {
    at::Tensor x = data;
    for (const auto& layer : *layers) x = layer->as<nn::Linear>()->forward(x);
    return x.square().mean();
  }
  nn::ModuleList layers{register_module("layers", nn::ModuleList())};
};

}  // namespace

std::shared_ptr<Model> make_model(const std::string& name) {
  std::shared_ptr<Model> model;
  if (name == "mlp") model = std::make_shared<Mlp>();
  if (name == "resnet") model = std::make_shared<ResNet>(ResNetShape{1, 3, 1, false, {32, 64, 128}, 10});
  if (name == "resnet18") model = std::make_shared<ResNet>(ResNetShape{3, 7, 2, true, {64, 128, 256, 512}, 1000});
  if (const auto shape = transformer_named(name)) model = std::make_shared<Transformer>(*shape);
  if (name == "small_1000") model = std::make_shared<Small>(1000);
  if (name == "small_10000") model = std::make_shared<Small>(10000);
  if (name == "linear_100m") model = std::make_shared<Linear100m>();
  if (!model) throw std::invalid_argument("no model is named " + name);
  fill(*model);
  return model;
}

Batch make_batch(const std::string& model, int rank) {
  const auto whole = [&](at::IntArrayRef shape, double key, double end) {
    return ((formula(shape, key) + 0.5) * end).floor().to(at::kLong);
  };
  const int key = 1000 + 10 * rank;
  if (model == "resnet") return {formula({64, 1, 28, 28}, key).to(at::kFloat), whole({64}, key + 1, 10)};
  if (model == "resnet18") return {formula({64, 3, 224, 224}, key).to(at::kFloat), whole({64}, key + 1, 1000)};
  if (const auto shape = transformer_named(model))
    return {whole({shape->batch, shape->length}, key, kTokens), whole({shape->batch, shape->length}, key + 1, kTokens)};
  if (model.starts_with("small_")) return {formula({64}, key).to(at::kFloat), {}};
  if (model == "linear_100m") return {formula({1, 2048}, key).to(at::kFloat), {}};
  return {formula({64, 784}, key).to(at::kFloat), whole({64}, key + 1, 10)};
}

Batch make_whole_batch(const std::string& model, int ranks) {
  std::vector<at::Tensor> data, targets;
  for (int rank = 0; rank < ranks; ++rank) {
    const Batch part = make_batch(model, rank);
    data.push_back(part.data.dim() == 1 ? part.data.unsqueeze(0) : part.data);
    if (part.target.defined()) targets.push_back(part.target);
  }
  return {at::cat(data), targets.empty() ? at::Tensor() : at::cat(targets)};
}

}  // namespace lockstep::bench
