// Fully sharded training on machines that LOCKSTEP_MACHINE makes, against DistributedDataParallel with the sharded
// optimizer on as many ranks of one machine: the same bits.

#include <lockstep/fully_sharded_data_parallel.h>

#include <fstream>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/small_gpt.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

namespace lockstep::fully_sharded_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::SGDOptions;

constexpr int kLayers = 4, kSteps = 7;

class FullySharded : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""},          {2, "shm"},  {3, "shm"},
                           {4, "shm"},       {2, "gloo"}, {2, "hierarchical", "ab"},
                           {3, "hierarchical", "abc"},    {4, "hierarchical", "aabb"},
                           {4, "hierarchical", "abcd"}};
INSTANTIATE_TEST_SUITE_P(Machines, FullySharded, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

/// The norm of each step, and the weights in the end.
template <typename Options>
std::string trained_by(auto& model, SmallGpt& net, const Context& context, const Options& options, bool clip,
                       const std::function<StateDict()>& state) {
  ZeroRedundancyOptimizer optimizer(model, decay_groups(*net, options), options);
  std::ostringstream text;
  text << std::hexfloat;
  for (int step = 0; step < kSteps; ++step) {
    optimizer.zero_grad();
    const at::Tensor data = text_of(step, context.rank());
    loss_of(model(data, step), data).backward();
    if (clip) text << model.clip_grad_norm(0.3) << ' ';
    optimizer.step();
  }
  const StateDict end = state();
  if (context.rank() == 0) text << hash(end);
  return text.str();
}

template <typename Options>
void compare(const Engine& engine, const Options& options, bool clip) {
  const TemporaryFolder folder;
  const std::string path = folder.path() / "expected";
  run_alike({engine.world_size, engine.world_size == 1 ? "" : "shm"}, [&](Context& context) {
    SmallGpt net(kLayers);
    DistributedDataParallel model(net, context);
    const std::string all = trained_by(model, net, context, options, clip, [&] { return state_dict(*net); });
    if (context.rank() == 0) std::ofstream(path) << all;
  });
  run_alike(engine, [&](Context& context) {
    SmallGpt net(kLayers);
    if (context.rank() != 0) torch::nn::init::constant_(net->head->bias, 5);  // rank 0's count
    FullyShardedDataParallel model(net, context);
    const std::string all = trained_by(model, net, context, options, clip, [&] { return model.state_dict(); });
    std::string expected;
    std::getline(std::ifstream(path), expected);
    EXPECT_FALSE(expected.empty());
    if (context.rank() == 0) {
      EXPECT_EQ(all, expected);
    }
  });
}

TEST_P(FullySharded, HasTheBitsOfTheShardedOptimizer) {
  compare(GetParam(), AdamWOptions(0.01).weight_decay(0.1), /*clip=*/true);
}

TEST_P(FullySharded, StepsLikeSgd) {
  compare(GetParam(), SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01), /*clip=*/false);
}

TEST_P(FullySharded, HoldsTheRightNumbersWhileAUnitIsCalled) {
  run_alike(GetParam(), [&](Context& context) {
    SmallGpt net(kLayers), plain(kLayers);
    FullyShardedDataParallel model(net, context);
    const torch::NoGradGuard no_grad;
    for (int again = 0; again < 3; ++again) {
      const at::Tensor data = text_of(again, context.rank());
      EXPECT_TRUE(at::equal(model(data, again), plain->forward(data, again)));
    }
  });
}

}  // namespace
}  // namespace lockstep::fully_sharded_test
