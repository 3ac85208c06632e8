#include <gtest/gtest.h>

#include <torch/nn.h>
#include <torch/optim.h>

#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/complaint.h"

namespace lockstep {
namespace {

using testing::complaint;
using torch::optim::SGDOptions;

struct NetImpl : torch::nn::Module {
  torch::nn::Conv2d conv{register_module("conv", torch::nn::Conv2d(1, 2, 3))};
  torch::nn::BatchNorm2d bn{register_module("bn", torch::nn::BatchNorm2d(2))};
  torch::nn::Linear fc{register_module("fc", torch::nn::Linear(4, 3))};
  at::Tensor tied{register_parameter("tied", fc->weight)};
  at::Tensor frozen{register_parameter("frozen", at::zeros({2, 2}), false)};
};
TORCH_MODULE(Net);

std::vector<const void*> ids(const std::vector<at::Tensor>& tensors) {
  std::vector<const void*> result;
  for (const auto& tensor : tensors) result.push_back(tensor.unsafeGetTensorImpl());
  return result;
}

TEST(ParameterGroups, BiasesAndNormsHaveNoDecay) {
  Net net;
  const auto groups = decay_groups(*net, SGDOptions(0.1).weight_decay(0.05));
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(ids(groups[0].params()).size(), 2u);
  EXPECT_EQ(ids(groups[1].params()), ids({net->conv->bias, net->bn->weight, net->bn->bias, net->fc->bias}));
  const std::set<const void*> with_decay{net->conv->weight.unsafeGetTensorImpl(),
                                         net->fc->weight.unsafeGetTensorImpl()};
  const auto first = ids(groups[0].params());
  EXPECT_EQ(std::set<const void*>(first.begin(), first.end()), with_decay);
}

/// LibTorch's constructors would give the second group the decay of the first.
TEST(ParameterGroups, AnOptimizerKeepsTheOptionsOfEachGroup) {
  Net net;
  const SGDOptions options = SGDOptions(0.1).weight_decay(0.05);
  auto optimizer = make_optimizer<torch::optim::SGD>(decay_groups(*net, options), options);
  const auto decay = [&](size_t group) {
    return static_cast<SGDOptions&>(optimizer.param_groups()[group].options()).weight_decay();
  };
  EXPECT_EQ(decay(0), 0.05);
  EXPECT_EQ(decay(1), 0);
  EXPECT_EQ(optimizer.param_groups()[1].options().get_lr(), 0.1);
  for (auto& parameter : net->parameters()) parameter.mutable_grad() = at::zeros_like(parameter);
  {
    at::NoGradGuard no_grad;
    net->fc->weight.fill_(1);
    net->fc->bias.fill_(1);
  }
  optimizer.step();
  EXPECT_FLOAT_EQ(net->fc->weight[0][0].item<float>(), 1 - 0.1f * 0.05f);
  EXPECT_EQ(net->fc->bias[0].item<float>(), 1);
}

TEST(ParameterGroups, AModelWithoutNormsAndBiasesHasOneGroup) {
  torch::nn::Linear net(torch::nn::LinearOptions(2, 3).bias(false));
  EXPECT_EQ(decay_groups(*net, SGDOptions(0.1).weight_decay(0.05)).size(), 1u);
}

TEST(ParameterGroups, WhatMatchesNothingOrTwiceIsListed) {
  Net net;
  const auto named = [](const char* part) {
    return [part](const std::string& name, const at::Tensor&) { return name.find(part) != std::string::npos; };
  };
  const SGDOptions options(0.1);
  const std::string text = complaint([&] {
    parameter_groups(*net, {{"convolutions", named("conv"), options},
                            {"biases", named("bias"), options},
                            {"heads", named("head"), options}});
  });
  for (const char* part : {"bn.weight matches no rule", "conv.bias matches several: convolutions, biases",
                           "the rule `heads` matches no parameter"})
    EXPECT_NE(text.find(part), std::string::npos) << part << "\nis not in\n" << text;
  EXPECT_EQ(text.find("conv.weight"), std::string::npos) << text;
  EXPECT_EQ(text.find("frozen"), std::string::npos) << text;
  EXPECT_NE(complaint([&] { parameter_groups(*net, {}); }), "");
}

TEST(ParameterGroups, ARuleWithoutPredicateIsNamed) {
  Net net;
  const SGDOptions options(0.1);
  const std::string text = complaint([&] {
    parameter_groups(*net, {{"all", is_bias_or_norm, options}, {"rest", nullptr, options}});
  });
  EXPECT_NE(text.find("the rule `rest` (number 1) has no predicate"), std::string::npos) << text;
  const std::string of_decay = complaint([&] { decay_groups(*net, options, nullptr); });
  EXPECT_NE(of_decay.find("the rule `without decay` has no predicate"), std::string::npos) << of_decay;
}

TEST(ParameterGroups, OptionsOfAnotherOptimizerAreNamed) {
  using torch::optim::AdamW;
  using torch::optim::AdamWOptions;
  Net net;
  std::vector<torch::optim::OptimizerParamGroup> groups = decay_groups(*net, AdamWOptions(0.1));
  groups[1].set_options(std::make_unique<SGDOptions>(0.1));
  const std::string expected = "group 1 has SGDOptions, but AdamW takes AdamWOptions";
  for (const std::string& text : {complaint([&] { (void)make_optimizer<AdamW>(groups, AdamWOptions(0.1)); }),
                                  complaint([&] { (void)make_optimizer<AdamW>(groups, 1e-3); }),
                                  complaint([&] { ZeroRedundancyOptimizer<AdamW>(groups, AdamWOptions(0.1)); }),
                                  complaint([&] { ZeroRedundancyOptimizer<AdamW>(groups, 1e-3); })})
    EXPECT_NE(text.find(expected), std::string::npos) << text;
  groups[1].set_options(std::make_unique<AdamWOptions>(0.2));
  const auto made = make_optimizer<AdamW>(groups, 1e-3);
  EXPECT_EQ(made.param_groups()[1].options().get_lr(), 0.2);
  const ZeroRedundancyOptimizer<AdamW> sharded(groups, 1e-3);
  EXPECT_EQ(sharded.param_groups()[1].options().get_lr(), 0.2);
}

}  // namespace
}  // namespace lockstep
