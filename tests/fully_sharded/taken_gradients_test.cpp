// Gradients of a unit leave autograd one by one, while the unit's backward goes on.

#include <lockstep/activation_checkpoint.h>
#include <lockstep/fully_sharded_data_parallel.h>

#include <fstream>
#include <vector>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::taken_gradients_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::SGDOptions;

constexpr int64_t kWidth = 40;

/// Two layers. Notes, when the backward of the second is done, whether its weight's .grad holds anything.
struct PairImpl : torch::nn::Module {
  PairImpl() {
    register_module("first", first = torch::nn::Linear(kWidth, kWidth));
    register_module("second", second = torch::nn::Linear(kWidth, kWidth));
  }
  at::Tensor forward(const at::Tensor& x) {
    const at::Tensor between = first(x);
    between.register_hook([this](const at::Tensor&) { held.push_back(second->weight.grad().defined()); });
    return second(torch::tanh(between));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  std::vector<bool> held;
};
TORCH_MODULE(Pair);

TEST(TakenGradients, AreNotHeldByAutograd) {
  for (const Engine& engine :
       {Engine{1, ""}, Engine{2, "shm"}, Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [&engine](Context& context) {
      std::vector<ShardedUnit<Pair>> units(2);
      torch::nn::Sequential net(units[0], units[1]);
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.1));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        model(at::ones({2, kWidth})).sum().backward();
        EXPECT_GT(model.clip_grad_norm(1), 0);
        optimizer.step();
      }
      // Between machines, those of the unit before may wait until the sums of this one have arrived.
      EXPECT_EQ(units[1]->held, std::vector<bool>(3, false));
      EXPECT_EQ(units[0]->held.size(), 3);
      if (engine.backend != "hierarchical") {
        EXPECT_EQ(units[0]->held, std::vector<bool>(3, false));
      }
    });
}

/// A layer whose weight is used in a part that is computed again in backward, and outside of it: autograd reaches it
/// twice in one backward.
struct TwiceImpl : torch::nn::Module {
  TwiceImpl() { register_module("layer", layer = torch::nn::Linear(kWidth, kWidth)); }
  at::Tensor forward(const at::Tensor& x) {
    const auto again = [layer = layer](const at::Tensor& y) mutable { return torch::tanh(layer(y)); };
    return layer(checkpoint(again, torch::tanh(layer(x)))) + x;
  }
  torch::nn::Linear layer{nullptr};
};
TORCH_MODULE(Twice);

std::string trained(auto& model, torch::nn::Sequential& net, const Context& context,
                    const std::function<StateDict()>& state) {
  ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.1).momentum(0.9));
  for (int step = 0; step < 4; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = at::arange(3 * kWidth).view({3, kWidth}).mul(0.01 * (context.rank() + 1)).add(step).sin();
    model(data).square().mean().backward();
    optimizer.step();
  }
  const StateDict end = state();
  return context.rank() == 0 ? hash(end) : "";
}

torch::nn::Sequential two() {
  torch::manual_seed(5);
  return torch::nn::Sequential(ShardedUnit<Twice>(), ShardedUnit<Twice>());
}

TEST(TakenGradients, OfOneParameterAddUpInABackward) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}}) {
    const TemporaryFolder folder;
    const std::string path = folder.path() / "expected";
    run_alike({engine.world_size, "shm"}, [&](Context& context) {
      torch::nn::Sequential net = two();
      DistributedDataParallel model(net, context);
      const std::string expected = trained(model, net, context, [&] { return state_dict(*net); });
      if (context.rank() == 0) std::ofstream(path) << expected;
    });
    run_alike(engine, [&](Context& context) {
      torch::nn::Sequential net = two();
      FullyShardedDataParallel model(net, context);
      const std::string found = trained(model, net, context, [&] { return model.state_dict(); });
      std::string expected;
      std::getline(std::ifstream(path), expected);
      EXPECT_FALSE(expected.empty());
      if (context.rank() == 0) {
        EXPECT_EQ(found, expected);
      }
    });
  }
}

}  // namespace
}  // namespace lockstep::taken_gradients_test
