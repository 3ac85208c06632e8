#include <gtest/gtest.h>
#include <torch/torch.h>

#include <memory>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/ranks.h"

// Fifty steps that 1 to 4 ranks share out, with each option, against LibTorch's optimizers on one process, and to the
// bit against one process with our kernels, so that the bits do not depend on the number of ranks.

namespace lockstep::steps_of_ranks_test {
namespace {

using testing::run_ranks;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

using Tensors = std::vector<at::Tensor>;

constexpr int kSteps = 50;
constexpr size_t kOftenUnused = 4, kNeverUsed = 5;

/// A scalar, tails, one that several ranks step, one whose elements lie in another order, one that is used in every
/// third step, and one that no rank uses.
Tensors make_parameters(at::ScalarType type) {
  torch::manual_seed(7);
  Tensors parameters;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {3, 7}, {70, 100}, {64, 33}, {129}, {17}})
    parameters.push_back(at::randn(shape, at::kDouble).to(type));
  parameters[3] = parameters[3].t();
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

/// Undefined where no rank uses the parameter in this step.
at::Tensor gradient_of(const at::Tensor& parameter, size_t place, int step) {
  if (place == kNeverUsed || (place == kOftenUnused && step % 3 != 1)) return {};
  torch::manual_seed(100 * static_cast<uint64_t>(step) + place);
  return at::randn(parameter.sizes(), at::kDouble).to(parameter.scalar_type());
}

void set_gradients(Tensors parameters, int step, at::ScalarType as) {
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = gradient_of(parameters[i].to(as), i, step);
    parameters[i].mutable_grad() = gradient.defined() ? gradient.to(parameters[i].scalar_type()) : gradient;
  }
}

/// Each parameter's gradient comes from one rank, another one in each step; to the others it is zero, or unused. Their
/// sum is exact, so it is the same on any number of ranks.
void backward(const Tensors& parameters, int step, const Context& context) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (size_t i = 0; i < parameters.size(); ++i) {
    const at::Tensor gradient = gradient_of(parameters[i], i, step);
    if (!gradient.defined()) continue;
    const size_t turn = (i + static_cast<size_t>(step)) % static_cast<size_t>(context.world_size());
    if (turn == static_cast<size_t>(context.rank()))
      loss = loss + (parameters[i] * gradient).sum().to(at::kDouble);
    else if (i % 2 == 0)
      loss = loss + (parameters[i] * 0).sum().to(at::kDouble);
  }
  if (!loss.requires_grad()) loss = (parameters[0] * 0).sum();
  loss.backward();
}

/// Two groups, the second at another rate.
template <typename Options>
std::vector<OptimizerParamGroup> groups_of(const Tensors& parameters, const Options& options) {
  Options other = options;
  other.lr(options.lr() * 0.37);
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(Tensors(parameters.begin(), parameters.begin() + 2), std::make_unique<Options>(options));
  groups.emplace_back(Tensors(parameters.begin() + 2, parameters.end()), std::make_unique<Options>(other));
  return groups;
}

struct Dtype {
  at::ScalarType type, reference;
  bool masters;
  double relative, absolute;  ///< to LibTorch's results
};
/// Parameters of 16 bits with masters are LibTorch's in float, rounded: to the last place of bfloat16.
const Dtype kDtypes[] = {{at::kFloat, at::kFloat, false, 1e-5, 4e-6},
                         {at::kDouble, at::kDouble, false, 1e-13, 1e-14},
                         {at::kBFloat16, at::kFloat, true, 0x1p-8, 4e-6}};

template <typename Optimizer, typename Options>
void compare(const Context& context, const Options& options, const Dtype& dtype, bool shared) {
  const Tensors mine = make_parameters(dtype.type), alone = make_parameters(dtype.type);
  Tensors theirs;
  for (const at::Tensor& parameter : make_parameters(dtype.type))
    theirs.push_back(parameter.detach().to(dtype.reference).requires_grad_());
  NamedTensors named;
  for (size_t i = 0; i < mine.size(); ++i) named.emplace_back("p" + std::to_string(i), mine[i]);
  DistributedDataParallel model(named, context, {.bucket_cap_mb = 0.01, .reduction = GradientReduction::kSum});
  ZeroRedundancyOptimizer<Optimizer> optimizer(model, groups_of(mine, options), options,
                                               {.shared_parameters = shared, .master_weights = dtype.masters});
  ZeroRedundancyOptimizer<Optimizer> one(groups_of(alone, options), options, {.master_weights = dtype.masters});
  Optimizer libtorch(groups_of(theirs, options), options);
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    backward(mine, step, context);
    optimizer.step();
    set_gradients(alone, step, dtype.type);
    one.step();
    set_gradients(theirs, step, dtype.type);
    libtorch.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(mine[i].equal(alone[i])) << "parameter " << i << " of " << dtype.type;
    EXPECT_TRUE(at::allclose(mine[i].to(dtype.reference), theirs[i], dtype.relative, dtype.absolute))
        << "parameter " << i << " of " << dtype.type << ": "
        << (mine[i].to(dtype.reference) - theirs[i]).abs().max().template item<double>();
  }
  EXPECT_TRUE(mine[kNeverUsed].equal(make_parameters(dtype.type)[kNeverUsed]));
  const StateDict state = state_dict(optimizer), expected = state_dict(one);
  ASSERT_EQ(state.keys(), expected.keys());
  for (const auto& item : expected) EXPECT_TRUE(item.value().equal(state[item.key()])) << item.key();
  context.group().barrier();  // with shared parameters, no rank goes on while another compares
}

class StepsOfRanks : public ::testing::TestWithParam<testing::Engine> {
 protected:
  template <typename Optimizer, typename Options>
  void compare_all(const std::vector<Options>& options) {
    run_ranks(GetParam(), [&](Context& context) {
      for (size_t i = 0; i < options.size(); ++i)
        for (const Dtype& dtype : kDtypes)
          for (const bool shared : {false, true}) {
            if (shared && GetParam().backend == "gloo") continue;
            SCOPED_TRACE(c10::str("options ", i, shared ? ", shared" : ""));
            compare<Optimizer>(context, options[i], dtype, shared);
          }
    });
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, StepsOfRanks,
                         ::testing::Values(testing::Engine{1, ""}, testing::Engine{2, "shm"}, testing::Engine{3, "shm"},
                                           testing::Engine{4, "shm"}, testing::Engine{2, "gloo"},
                                           testing::Engine{3, "gloo"}, testing::Engine{4, "gloo"},
                                           testing::Engine{3, "hierarchical", "aab"}),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(StepsOfRanks, AreLibTorchsSgd) {
  compare_all<torch::optim::SGD>(std::vector{SGDOptions(0.05), SGDOptions(0.05).weight_decay(0.1),
                                             SGDOptions(0.05).momentum(0.9),
                                             SGDOptions(0.05).momentum(0.9).dampening(0.4).weight_decay(0.01),
                                             SGDOptions(0.05).momentum(0.8).nesterov(true).weight_decay(0.01)});
}

TEST_P(StepsOfRanks, AreLibTorchsAdam) {
  compare_all<torch::optim::Adam>(std::vector{AdamOptions(1e-2),
                                              AdamOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-6),
                                              AdamOptions(1e-2).amsgrad(true)});
}

TEST_P(StepsOfRanks, AreLibTorchsAdamW) {
  compare_all<torch::optim::AdamW>(std::vector{AdamWOptions(1e-2),
                                               AdamWOptions(1e-2).weight_decay(0).betas({0.8, 0.95}).eps(1e-6),
                                               AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true)});
}

}  // namespace
}  // namespace lockstep::steps_of_ranks_test
