// Models that are never whole on any rank, not even while they are made.

#include <lockstep/sharded_initialization.h>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/deep.h"
#include "fully_sharded/small_gpt.h"
#include "support/complaint.h"
#include "support/ranks.h"

namespace lockstep::sharded_initialization_test {
namespace {

using namespace testing;  // NOLINT
using torch::optim::AdamWOptions;

const Engine kMachines{2, "hierarchical", "ab"};

/// What a rank is told, by either kind of error.
std::string told(const std::function<void()>& body) {
  try {
    return complaint(body);
  } catch (const Error& error) {
    return error.what();
  }
}
void expect(const std::string& said, const std::string& words) {
  EXPECT_NE(said.find(words), std::string::npos) << "it says: " << said;
}

class ShardedInitializationOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""},
                           {3, "shm"},
                           {2, "gloo"},
                           {2, "hierarchical", "ab"},
                           {3, "hierarchical", "abc"},
                           {4, "hierarchical", "aabb"}};
INSTANTIATE_TEST_SUITE_P(Machines, ShardedInitializationOn, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

TEST_P(ShardedInitializationOn, MakesTheModelThatIsMadeWithoutIt) {
  run_alike(GetParam(), [](Context& context) {
    const auto trained = [&](bool part_by_part) {
      std::optional<ShardedInitialization> initialization;
      if (part_by_part) initialization.emplace(context);
      SmallGpt net(4);
      initialization.reset();
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      std::string hashes;
      for (int step = 0; step < 4; ++step) {
        const StateDict state = model.state_dict();
        if (context.rank() == 0) hashes += hash(state) + ' ';
        optimizer.zero_grad();
        const at::Tensor data = text_of(step, context.rank());
        loss_of(model(data, step), data).backward();
        optimizer.step();
      }
      return hashes;
    };
    EXPECT_EQ(trained(true), trained(false));
  });
}

TEST_P(ShardedInitializationOn, TakesRankZerosNumbers) {
  run_alike(GetParam(), [](Context& context) {
    const auto make = [](uint64_t seed) {
      torch::manual_seed(seed);
      return torch::nn::Sequential(ShardedUnit<Block>(24), ShardedUnit<Block>(24));
    };
    const std::string expected = hash(state_dict(*make(0)));
    std::optional<ShardedInitialization> part_by_part(context);
    const torch::nn::Sequential net = make(static_cast<uint64_t>(context.rank()));
    part_by_part.reset();
    FullyShardedDataParallel model(net.ptr(), context);
    const StateDict state = model.state_dict();
    EXPECT_EQ(state.is_empty(), context.rank() != 0);
    if (context.rank() == 0) {
      EXPECT_EQ(hash(state), expected);
    }
  });
}

TEST(ShardedInitialization, HoldsNoMoreThanPartsAndAUnit) {
  for (const Engine& engine : {Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}}) {
    SCOPED_TRACE(name_of(engine));
    run_alike(engine, [](Context& context) {
      (void)at::ones({1}).sum();
      const int64_t before = proportional_kib();
      int64_t most = 0;
      std::optional<ShardedInitialization> part_by_part(context);
      torch::nn::Sequential layers;
      for (int i = 0; i < DeepImpl::kUnits; ++i) {
        layers->push_back(ShardedUnit<Wide>());
        most = std::max(most, proportional_kib() - before);
      }
      part_by_part.reset();
      FullyShardedDataParallel model(layers.ptr(), context);
      EXPECT_GT(most, kModelKib / context.world_size() / 2);
      EXPECT_LT(most, kModelKib / context.world_size() + 4 * kUnitKib);
      EXPECT_LT(proportional_kib() - before, kModelKib / context.world_size() + 6 * kUnitKib);
    });
  }
}

TEST(ShardedInitialization, TellsWhatIsReadTooEarly) {
  for (const Engine& engine : {kMachines, Engine{2, "shm"}})
    run_alike(engine, [](Context& context) {
      const ShardedInitialization part_by_part(context);
      SmallGpt net(2);
      expect(told([&] { (void)net->forward(text_of(0, 0)); }), "is not gathered");
      expect(told([&] { torch::nn::init::zeros_(net->parameters()[3]); }),
             "a parameter of `unit 0 that was made` is not gathered");
      expect(told([&] { ShardedInitialization another(context); }), "this thread already has one");
    });
}

TEST(ShardedInitialization, TellsRanksThatMakeOtherUnits) {
  for (const Engine& engine : {kMachines, Engine{3, "hierarchical", "abc"}, Engine{2, "shm"}, Engine{2, "gloo"}})
    run_alike(engine, [](Context& context) {
      const ShardedInitialization part_by_part(context);
      expect(told([&] { ShardedUnit<Block> layer(context.rank() == 1 ? 24 : 12); }),
             "Float [12] on cpu, no gradient` on rank");
    });
}

TEST(ShardedInitialization, MayMakeAModelInSeveralGoes) {
  run_alike(kMachines, [](Context& context) {
    torch::nn::Sequential layers;
    for (int i = 0; i < 2; ++i) {
      const ShardedInitialization part_by_part(context);
      layers->push_back(ShardedUnit<Wide>());
    }
    EXPECT_EQ(told([&] { FullyShardedDataParallel model(layers.ptr(), context); }), "");
  });
}

}  // namespace
}  // namespace lockstep::sharded_initialization_test
