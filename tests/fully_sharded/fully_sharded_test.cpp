// Fully sharded training on machines that LOCKSTEP_MACHINE makes, against DistributedDataParallel with the sharded
// optimizer on as many ranks of one machine: the same bits.

#include <lockstep/fully_sharded_data_parallel.h>

#include <fstream>

#include <gtest/gtest.h>
#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "fully_sharded/deep.h"
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

class FullyShardedOn : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""},
                           {2, "shm"},
                           {3, "shm"},
                           {4, "shm"},
                           {2, "gloo"},
                           {2, "hierarchical", "ab"},
                           {3, "hierarchical", "abc"},
                           {4, "hierarchical", "aabb"},
                           {4, "hierarchical", "abcd"}};
INSTANTIATE_TEST_SUITE_P(Machines, FullyShardedOn, ::testing::ValuesIn(kEngines),
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
void compare(const Engine& engine, const Options& options, bool clip, const FullyShardedOptions& sharded = {}) {
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
    FullyShardedDataParallel model(net, context, sharded);
    const std::string all = trained_by(model, net, context, options, clip, [&] { return model.state_dict(); });
    std::string expected;
    std::getline(std::ifstream(path), expected);
    EXPECT_FALSE(expected.empty());
    if (context.rank() == 0) {
      EXPECT_EQ(all, expected);
    }
  });
}

TEST_P(FullyShardedOn, HasTheBitsOfTheShardedOptimizer) {
  compare(GetParam(), AdamWOptions(0.01).weight_decay(0.1), /*clip=*/true);
}

TEST_P(FullyShardedOn, HasTheSameBitsWhateverStaysOrComesAhead) {
  compare(GetParam(), AdamWOptions(0.01), /*clip=*/true, {.keep_gathered = true});
  for (const int prefetch : {0, 3})
    compare(GetParam(), SGDOptions(0.1).momentum(0.9), /*clip=*/true, {.prefetch = prefetch});
}

TEST(FullyShardedOptionsTest, UnitsThatStayGatheredAreGatheredOnceAStep) {
  for (const Engine& engine : {Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [](Context& context) {
      const auto figures_of = [&](const FullyShardedOptions& options) {
        SmallGpt net(kLayers);
        FullyShardedDataParallel model(net, context, options);
        ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.1));
        int64_t sent = 0;
        for (int step = 0; step < 3; ++step) {
          const int64_t before = model.stats().sent_bytes;
          optimizer.zero_grad();
          const at::Tensor data = text_of(step, context.rank());
          loss_of(model(data, step), data).backward();
          optimizer.step();
          sent = model.stats().sent_bytes - before;
        }
        {  // what was gathered is right until the next step
          const torch::NoGradGuard no_grad;
          model(text_of(9, context.rank()), 9);
          const int64_t gathers = model.stats().gathers;
          model(text_of(9, context.rank()), 9);
          EXPECT_EQ(model.stats().gathers == gathers, options.keep_gathered);
        }
        return std::pair(sent, model.stats().gathered_bytes);
      };
      const auto [once, all] = figures_of({.keep_gathered = true});
      const auto [twice, two] = figures_of({});
      // The gradients, and what was gathered once or, but for two of the units, twice.
      EXPECT_LT(static_cast<double>(once), 0.9 * static_cast<double>(twice));
      EXPECT_GT(all, two) << "a slot for each unit";
    });
}

TEST(FullyShardedOptionsTest, RanksMustAgree) {
  for (const Engine& engine : {Engine{2, "shm"}, Engine{2, "gloo"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [](Context& context) {
      SmallGpt net(1);
      const bool odd = context.rank() == context.world_size() - 1;
      const auto making = [&](const FullyShardedOptions& options) {
        try {
          FullyShardedDataParallel(net, context, options);
        } catch (const std::exception& error) {
          return std::string(error.what());
        }
        return std::string();
      };
      const std::string kept = making({.keep_gathered = odd}), ahead = making({.prefetch = odd ? 2 : 1}),
                        too_many = making({.prefetch = odd ? 9 : 1});
      EXPECT_NE(kept.find("the ranks make a FullyShardedDataParallel with different options: "), std::string::npos)
          << kept;
      EXPECT_NE(ahead.find("`prefetch = 2` on "), std::string::npos) << ahead;
      EXPECT_NE(too_many.find("prefetch is 9; it must be from 0 to 8"), std::string::npos) << too_many;
    });
}

TEST_P(FullyShardedOn, StepsLikeSgd) {
  compare(GetParam(), SGDOptions(0.1).momentum(0.9).nesterov(true).weight_decay(0.01), /*clip=*/false);
}

TEST_P(FullyShardedOn, HoldsTheRightNumbersWhileAUnitIsCalled) {
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

TEST(FullyShardedMemory, GatheredUnitsGiveTheirMemoryUpForTheNext) {
  for (const Engine& engine : {Engine{2, "hierarchical", "ab"}, Engine{4, "hierarchical", "aabb"}})
    run_alike(engine, [](Context& context) {
      const at::Tensor x = at::ones({2, 1024});
      const auto machine = context.group().on_this_machine();
      const auto of_machine = [&] {
        const at::Tensor kib = at::tensor(proportional_kib(), at::kLong);
        machine.all_reduce(kib);
        return kib.item<int64_t>();
      };
      Deep net;
      const int64_t ranks = machine.world_size(), before = of_machine() - ranks * kModelKib;
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(0.001));
      int64_t most = 0;
      const auto look = [&] { most = std::max(most, of_machine() - before); };
      look();
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        const at::Tensor loss = model(x).square().sum();
        look();
        loss.backward();
        look();
        optimizer.step();
        look();
      }
      // Parts, their gradients and AdamW's two arrays; two slots; each rank's gradients of a unit in its buffer and in
      // autograd, and a unit that a machine adds up. 20 MiB for what LibTorch, Gloo and malloc keep.
      const int64_t expected = 4 * kModelKib / 2 + 2 * kUnitKib + 2 * ranks * kUnitKib + kUnitKib + ranks * 20 * 1024;
      EXPECT_LT(most, expected);
      EXPECT_LT(expected, 4 * kModelKib) << "a machine that holds everything would pass";
      const FullyShardedStats stats = model.stats();
      EXPECT_EQ(stats.parameter_bytes, kModelKib * 1024);
      EXPECT_NEAR(static_cast<double>(stats.part_bytes),
                  static_cast<double>(stats.parameter_bytes) / context.world_size(), 1 << 19);
      EXPECT_LT(stats.gathered_bytes, 2 * kUnitKib * 1024 + (1 << 20)) << "two slots, whatever the number of units";
    });
}

TEST(FullySharded, GathersAUnitOnceForForwardAndOnceForBackward) {
  run_alike({4, "hierarchical", "aabb"}, [](Context& context) {
    Deep net;
    FullyShardedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.001));
    const at::Tensor x = at::ones({2, 1024});
    int64_t gathers = 0, sent = 0;
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad();
      model(x).square().sum().backward();
      optimizer.step();
      const FullyShardedStats stats = model.stats();
      // Backward begins with the two units that forward ended with.
      EXPECT_EQ(stats.gathers - std::exchange(gathers, stats.gathers), 2 * DeepImpl::kUnits - 2) << "step " << step;
      const double slices = static_cast<double>(stats.sent_bytes - std::exchange(sent, stats.sent_bytes)) /
                            (static_cast<double>(stats.part_bytes) / DeepImpl::kUnits);
      EXPECT_EQ(slices, 3 * DeepImpl::kUnits - 2) << "a slice to one other machine for each";
    }
  });
}

TEST(FullySharded, SeveralBackwardsBeforeAStepAddUp) {
  run_alike({2, "hierarchical", "ab"}, [](Context& context) {
    const at::Tensor x = at::arange(2048).view({2, 1024}).remainder(7).to(at::kFloat) / 7;
    const auto trained = [&](int passes) {
      torch::manual_seed(1);
      Deep net;
      FullyShardedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.5));
      for (int step = 0; step < 2; ++step) {
        optimizer.zero_grad();
        for (int pass = 0; pass < passes; ++pass) (model(x).square().mean() / passes).backward();
        optimizer.step();
      }
      return hash(model.state_dict());
    };
    EXPECT_EQ(trained(1), trained(2)) << "halves are exact";
  });
}

TEST(FullySharded, TakesAStateAndGoesOn) {
  run_alike({4, "hierarchical", "aabb"}, [](Context& context) {
    SmallGpt other(kLayers), net(kLayers);
    const at::NoGradGuard no_grad;
    for (at::Tensor& parameter : other->parameters()) parameter.mul_(1.5);
    FullyShardedDataParallel model(net, context);
    model.load_state_dict(state_dict(*other));
    EXPECT_TRUE(at::equal(model(text_of(0, 0)), other->forward(text_of(0, 0))));
    EXPECT_EQ(model.hash(), hash(state_dict(*other)));
    const StateDict state = model.state_dict();
    if (context.rank() == 0) {
      EXPECT_EQ(hash(state), hash(state_dict(*other)));
    }
  });
}

}  // namespace
}  // namespace lockstep::fully_sharded_test
