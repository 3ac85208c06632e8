#include <lockstep/memory_estimate.h>

#include <gtest/gtest.h>
#include <lockstep/sharded_unit.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>

namespace lockstep {
namespace {

/// 4 units of 1 MiB, and 256 KiB outside of them.
torch::nn::Sequential model() {
  torch::nn::Sequential layers;
  const auto options = [](int64_t in) { return torch::nn::LinearOptions(in, 512).bias(false); };
  for (int i = 0; i < 4; ++i) layers->push_back(ShardedUnit<torch::nn::Linear>(options(512)));
  layers->push_back(torch::nn::Linear(options(128)));
  return layers;
}

constexpr int64_t kMiB = 1 << 20, kAll = 4 * kMiB + kMiB / 4;

TEST(EstimateMemory, CountsWhatEachWayHolds) {
  const auto needs = estimate_memory(*model(), {.machines = 2, .ranks_per_machine = 2, .activation_bytes = 7});
  ASSERT_EQ(needs.size(), 5);
  EXPECT_EQ(needs[0].name, "DistributedDataParallel");
  EXPECT_EQ(needs[0].rank_bytes, 4 * kAll + 7);
  EXPECT_EQ(needs[0].shared_bytes, 0);
  EXPECT_EQ(needs[0].machine_bytes, 2 * (4 * kAll + 7));
  EXPECT_EQ(needs[1].rank_bytes, 2 * kAll + kAll / 2 + 7);
  EXPECT_EQ(needs[2].rank_bytes, kAll + 7);
  EXPECT_EQ(needs[2].shared_bytes, 2 * kAll);
  EXPECT_EQ(needs[3].name, "FullyShardedDataParallel");
  // Its gradients of a unit, the one that autograd computes, and those of the last unit that are on their way.
  EXPECT_EQ(needs[3].rank_bytes, kAll + 2 * kMiB + kMiB / 2 + 7);
  EXPECT_EQ(needs[3].shared_bytes, 2 * kMiB + kMiB / 4);
  EXPECT_EQ(needs[3].machine_bytes, 2 * needs[3].rank_bytes + needs[3].shared_bytes);
  EXPECT_EQ(needs[4].name, "with .keep_gathered = true");
  EXPECT_EQ(needs[4].rank_bytes, needs[3].rank_bytes);
  EXPECT_EQ(needs[4].shared_bytes, kAll);
}

TEST(EstimateMemory, OfSixteenBitsWithMasters) {
  auto layers = model();
  layers->to(at::kBFloat16);
  for (const int here : {1, 2}) {
    const auto needs = estimate_memory(*layers, {.machines = 2, .ranks_per_machine = here, .state_per_parameter = 6});
    EXPECT_EQ(needs[0].rank_bytes, 4 * kAll) << "2 + 2 + 12 bytes a parameter";
    // Gradients of a unit are in float if ranks and machines add them; those in autograd, and those that wait, are not.
    const int64_t own = 2 * kAll / here, unit = kMiB / 2;
    EXPECT_EQ(needs[3].rank_bytes, own + unit * here + unit + unit / here);
    EXPECT_EQ(needs[3].shared_bytes, kMiB + kMiB / 8);
  }
}

TEST(EstimateMemory, NothingIsGatheredOnOneMachine) {
  const auto needs = estimate_memory(*model(), {.ranks_per_machine = 2});
  ASSERT_EQ(needs.size(), 4);
  EXPECT_EQ(needs[3].shared_bytes, 0);
  EXPECT_EQ(needs[3].rank_bytes, 2 * kAll + 2 * kMiB);
}

TEST(EstimateMemory, FrozenParametersHaveNoGradientAndNoState) {
  const auto layers = model();
  for (const auto& parameter : layers->parameters()) parameter.set_requires_grad(false);
  for (const MemoryNeed& need : estimate_memory(*layers, {.ranks_per_machine = 1}))
    EXPECT_TRUE(need.name.starts_with("Fully") || need.machine_bytes == kAll) << need.name;
}

TEST(EstimateMemory, OfShapesAlone) {
  auto layers = model();
  for (const auto& layer : layers->modules(/*include_self=*/false))
    for (auto& item : layer->named_parameters(/*recurse=*/false))
      layer->register_parameter("on_meta", at::empty_like(item.value(), at::kMeta));
  EXPECT_EQ(estimate_memory(*layers).front().machine_bytes, 8 * kAll);
}

TEST(EstimateMemory, WithoutUnitsNothingIsFullySharded) {
  EXPECT_EQ(estimate_memory(*torch::nn::Linear(2, 2), {.state_per_parameter = 0}).size(), 3);
}

TEST(EstimateMemory, RefusesNumbersThatMeanNothing) {
  const auto layers = model();
  EXPECT_THROW(estimate_memory(*layers, {.machines = 0}), c10::Error);
  EXPECT_THROW(estimate_memory(*layers, {.ranks_per_machine = -1}), c10::Error);
  EXPECT_THROW(estimate_memory(*layers, {.state_per_parameter = -1}), c10::Error);
  EXPECT_THROW(estimate_memory(*layers, {.activation_bytes = -1}), c10::Error);
  EXPECT_THROW(estimate_memory(*torch::nn::Sequential()), c10::Error);
}

TEST(MemoryTable, SaysWhatFits) {
  const auto needs = estimate_memory(*model(), {.machines = 2, .ranks_per_machine = 2});
  const std::string table = memory_table(needs, 20 * kMiB);
  EXPECT_NE(table.find("DistributedDataParallel                 17 MiB         0 MiB        34 MiB  too much"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("FullyShardedDataParallel                 7 MiB         3 MiB        16 MiB  fits"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("available here: 20 MiB"), std::string::npos);
  EXPECT_EQ(memory_table(needs).find("too much"), std::string::npos);
}

}  // namespace
}  // namespace lockstep
