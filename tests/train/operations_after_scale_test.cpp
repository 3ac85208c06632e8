#include <gtest/gtest.h>

#include <string>

#include <torch/torch.h>

#include <lockstep/activation_checkpoint.h>

#include "train/scaler_side.h"

// Layers and checkpoint() between scale() and backward(): what they add goes without the scale. Beside them layers that
// only multiply.

namespace lockstep::operations_after_scale_test {
namespace {

using namespace testing;             // NOLINT
using namespace wrong_scalers_test;  // NOLINT

/// A layer over features, in one replica, with an optimizer each.
struct Layers {
  explicit Layers(Context& context) : replica(all(), context) {}
  NamedTensors all() const {
    NamedTensors named;
    for (const auto& one : features->named_parameters()) named.emplace_back("features." + one.key(), one.value());
    for (const auto& one : layer->named_parameters()) named.emplace_back("layer." + one.key(), one.value());
    return named;
  }
  at::Tensor output() { return features->forward(input); }

  const at::Tensor input = at::full({4, 3}, 0.1);
  torch::nn::Linear features{3, 3}, layer{3, 2};
  DistributedDataParallel<NamedTensors> replica;
  torch::optim::SGD of_features{features->parameters(), 0.1}, of_layer{layer->parameters(), 0.1};
};

constexpr const char* kBeside =
    "GradScaler: {all} added a value without scale() to a loss that scale() had scaled, in 1 backward pass, ";
constexpr const char* kCheckpointed =
    "GradScaler: {all} gave checkpoint() a value that was computed from a loss that scale() had scaled, ";

Programs of_layers() {
  return {
      {"a_bias_of_a_linear_layer", kBeside,
       [](Side& s) {
         Layers layers(s.context);
         layers.layer->forward(s.scaler.scale(layers.output())).sum().backward();
         s.scaler.step(layers.of_layer);
       }},
      {"a_bias_of_a_linear_layer_of_three_dimensions", kBeside,
       [](Side& s) {
         Layers layers(s.context);
         layers.layer->forward(s.scaler.scale(layers.output()).view({2, 2, 3})).sum().backward();
         s.scaler.unscale(layers.of_layer);
       }},
      {"a_bias_of_a_convolution", kBeside,
       [](Side& s) {
         Layers layers(s.context);
         at::conv1d(s.scaler.scale(layers.output()).unsqueeze(1), layers.layer->weight.view({2, 1, 3}),
                    layers.layer->bias)
             .sum()
             .backward();
         s.scaler.step(layers.of_layer);
       }},
      {"a_product_that_addmm_adds", kBeside,
       [](Side& s) {
         Layers layers(s.context);
         const at::Tensor scaled = s.scaler.scale(layers.output()).narrow(1, 0, 2) * layers.layer->bias;
         at::addmm(scaled, layers.input, layers.layer->weight.t()).sum().backward();
         s.scaler.step(layers.of_layer);
       }},
  };
}

Programs of_checkpoints() {
  return {
      {"a_checkpoint_of_what_was_scaled", kCheckpointed,
       [](Side& s) {
         s.before = s.weights();
         checkpoint([](const at::Tensor& loss) { return loss.pow(2); }, s.scaler.scale(s.loss())).backward();
         s.scaler.step(s.optimizer);
       }},
      {"a_checkpoint_that_adds", kCheckpointed,
       [](Side& s) {
         s.before = s.weights();
         const at::Tensor weight = s.model->parameters().front();
         const auto add = [weight](const at::Tensor& loss) { return loss + weight.square().sum(); };
         (checkpoint(add, s.scaler.scale(s.loss()) / 2) * 2).backward();
         s.scaler.step(s.optimizer);
       }},
      {"a_checkpoint_of_two_inputs", kCheckpointed,
       [](Side& s) {
         s.before = s.weights();
         const auto add = [](const at::Tensor& one, const at::Tensor& other) { return one + other; };
         checkpoint(add, s.scaler.scale(s.loss()), s.loss(1)).backward();
         s.scaler.unscale(s.optimizer);
       }},
  };
}

Programs of_scale_in_a_checkpoint() {
  constexpr const char* kWithin = "GradScaler: {all} called scale() in a function that it gave to checkpoint(), ";
  return {
      {"scale_within_a_checkpoint", kWithin,
       [](Side& s) {
         s.before = s.weights();
         checkpoint([&s](const at::Tensor& one) { return s.scaler.scale(s.loss() * one); }, at::ones({})).backward();
         s.scaler.step(s.optimizer);
       }},
      {"scale_within_a_checkpoint_before_unscale", kWithin,
       [](Side& s) {
         s.before = s.weights();
         (checkpoint([&s](const at::Tensor& loss) { return s.scaler.scale(loss); }, s.loss()) / 2).backward();
         s.scaler.unscale(s.optimizer);
       }},
      {"scale_within_a_checkpoint_on_one_rank",
       "GradScaler: {odd} called scale() in a function that it gave to checkpoint(), ",
       [](Side& s) {
         s.before = s.weights();
         const auto scaled = [&s](const at::Tensor& loss) { return s.scaler.scale(loss); };
         (s.odd ? checkpoint(scaled, s.loss()) : scaled(s.loss())).backward();
         s.scaler.step(s.optimizer);
       }},
  };
}

Programs that_are_right() {
  return {
      {"a_bias_that_another_optimizer_has", "",
       [](Side& s) {
         Layers layers(s.context);
         layers.layer->forward(s.scaler.scale(layers.output())).sum().backward();
         EXPECT_TRUE(s.scaler.step(layers.of_features));
       }},
      {"products_without_a_bias", "",
       [](Side& s) {
         Layers layers(s.context);
         const at::Tensor scaled = s.scaler.scale(layers.output());
         const at::Tensor conv = at::conv1d(scaled.unsqueeze(1), layers.layer->weight.view({2, 1, 3})).squeeze(2);
         ((at::linear(scaled, layers.layer->weight) + conv) * layers.layer->bias).sum().backward();
         EXPECT_TRUE(s.scaler.step(layers.of_layer));
         EXPECT_TRUE(s.scaler.step(layers.of_features));
       }},
      {"a_bias_that_has_the_scale", "",
       [](Side& s) {
         Layers layers(s.context);
         const at::Tensor scaled = s.scaler.scale(layers.output());
         const at::Tensor bias = scaled.sum() * layers.layer->bias;
         at::linear(scaled, layers.layer->weight, bias).sum().backward();
         EXPECT_TRUE(s.scaler.step(layers.of_layer));
       }},
      {"a_checkpoint_before_scale", "",
       [](Side& s) {
         Layers layers(s.context);
         const at::Tensor output = checkpoint(layers.layer, layers.output());
         s.scaler.scale(output.square().sum()).backward();
         EXPECT_TRUE(s.scaler.step(layers.of_layer));
         EXPECT_TRUE(s.scaler.step(layers.of_features));
       }},
  };
}

using OperationsAfterScale = OfScalers;
INSTANTIATE_TEST_SUITE_P(Engines, OperationsAfterScale, ::testing::ValuesIn(engines_of_wrong_programs()),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(OperationsAfterScale, ThatAddABias) { expect(of_layers()); }
TEST_P(OperationsAfterScale, ThatAreCheckpointed) { expect(of_checkpoints()); }
TEST_P(OperationsAfterScale, ThatScaleInACheckpoint) { expect(of_scale_in_a_checkpoint()); }
TEST_P(OperationsAfterScale, ThatAreRightAreNoError) { expect(that_are_right()); }

}  // namespace
}  // namespace lockstep::operations_after_scale_test
