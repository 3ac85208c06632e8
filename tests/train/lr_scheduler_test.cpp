#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include <torch/optim.h>

#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/lr_scheduler.h>

#include "checkpoint/failure.h"
#include "support/ranks.h"
#include "support/temporary_folder.h"

// Schedules against PyTorch's; tests/golden/write_training_golden.py has the other side.

namespace lockstep {
namespace {

using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

constexpr double kRates[] = {0.1, 0.037};

torch::optim::SGD two_groups() {
  std::vector<OptimizerParamGroup> groups;
  for (int i = 0; i < 2; ++i) groups.push_back(OptimizerParamGroup({at::zeros({2}).requires_grad_()}));
  torch::optim::SGD optimizer(groups, SGDOptions(1).momentum(0.9));
  for (size_t i = 0; i < 2; ++i) optimizer.param_groups()[i].options().set_lr(kRates[i]);
  return optimizer;
}

std::map<std::string, std::vector<Schedule>> all_schedules() {
  const auto one_cycle = [](double maximum) {
    return one_cycle_lr(
        {.total_steps = 400, .max_lr = maximum, .pct_start = 0.23, .div_factor = 13, .final_div_factor = 77});
  };
  return {
      {"constant", {constant_lr(0.3, 17)}},
      {"linear", {linear_lr(0.01, 0.9, 137)}},
      {"step", {step_lr(37, 0.3)}},
      {"multi_step", {multi_step_lr({5, 80, 80, 81, 333}, 0.2)}},
      {"exponential", {exponential_lr(0.987)}},
      {"polynomial", {polynomial_lr(301, 2.3)}},
      {"cosine", {cosine_annealing_lr(123, 1e-4)}},
      {"cosine_to_zero", {cosine_annealing_lr(400)}},
      {"restarts", {cosine_annealing_warm_restarts(31, 2, 1e-3)}},
      {"equal_restarts", {cosine_annealing_warm_restarts(50)}},
      {"one_cycle", {one_cycle(kRates[0]), one_cycle(kRates[1])}},
      {"one_cycle_three_phases",
       {one_cycle_lr({.total_steps = 400,
                      .max_lr = 0.2,
                      .anneal_strategy = AnnealStrategy::kLinear,
                      .base_momentum = 0.7,
                      .max_momentum = 0.99,
                      .three_phase = true})}},
      {"warm_up", {warm_up(50, cosine_annealing_lr(350))}},
      {"sequential", {sequential_lr({linear_lr(0.1, 0.7, 33), step_lr(20, 0.5), polynomial_lr(200, 1.5)}, {40, 151})}},
  };
}

double momentum_of(torch::optim::Optimizer& optimizer, size_t group) {
  return static_cast<SGDOptions&>(optimizer.param_groups()[group].options()).momentum();
}

TEST(Schedules, HaveTheRatesOfPyTorchForEachGroup) {
  const StateDict golden =
      without_prefix("schedule/", load(LOCKSTEP_SOURCE_DIR "/tests/golden/training.safetensors").tensors);
  size_t compared = 0;
  for (const auto& [name, schedules] : all_schedules()) {
    auto optimizer = two_groups();
    LRScheduler scheduler(optimizer, schedules);
    const at::Tensor rates = golden[name + "/lr"];
    const at::Tensor* momenta = golden.find(name + "/momentum");
    compared += momenta ? 2 : 1;
    ASSERT_EQ(rates.size(0), 401);
    for (int64_t step = 0; step < rates.size(0); ++step) {
      if (step > 0) scheduler.step();
      for (size_t group = 0; group < 2; ++group) {
        // A straight line goes on below 0 after the last step of a cycle there.
        const double expected = std::max(0.0, rates[step][static_cast<int64_t>(group)].item<double>());
        // PyTorch multiplies the last rate on; on its way to zero that leaves a rest.
        ASSERT_NEAR(scheduler.get_last_lr()[group], expected, 1e-12 * expected + 1e-14 * kRates[group])
            << name << ", step " << step << ", group " << group;
      }
      if (momenta) {
        ASSERT_NEAR(momentum_of(optimizer, 1), (*momenta)[step].item<double>(), 1e-12) << name << step;
      }
    }
  }
  EXPECT_EQ(compared, golden.size());
}

TEST(Schedules, BetasTakeThePlaceOfMomentum) {
  torch::optim::AdamW optimizer({at::zeros({2}).requires_grad_()}, torch::optim::AdamWOptions(0.1).betas({0.5, 0.99}));
  LRScheduler scheduler(optimizer, one_cycle_lr({.total_steps = 10}));
  using Betas = std::tuple<double, double>;
  EXPECT_EQ(static_cast<torch::optim::AdamWOptions&>(optimizer.param_groups()[0].options()).betas(), Betas(0.95, 0.99));
  EXPECT_DOUBLE_EQ(scheduler.get_last_lr()[0], 0.1 / 25);
  for (int step = 0; step < 10; ++step) scheduler.step();
  EXPECT_THROW(scheduler.step(), c10::Error);
  torch::optim::Adagrad adagrad({at::zeros({2}).requires_grad_()});
  EXPECT_THROW(LRScheduler(adagrad, one_cycle_lr({.total_steps = 10})), c10::Error);
}

TEST(Schedules, RefuseWhatMakesNone) {
  auto optimizer = two_groups();
  EXPECT_THROW(sequential_lr({step_lr(3)}, {4}), c10::Error);
  EXPECT_THROW(sequential_lr({step_lr(3), step_lr(3), step_lr(3)}, {7, 4}), c10::Error);
  EXPECT_THROW(multi_step_lr({7, 4}), c10::Error);
  EXPECT_THROW(linear_lr(0), c10::Error);
  EXPECT_THROW(cosine_annealing_lr(0), c10::Error);
  EXPECT_THROW(LRScheduler(optimizer, {step_lr(1), step_lr(1), step_lr(1)}), c10::Error);
  EXPECT_THROW(LRScheduler(optimizer, Schedule{}), c10::Error);
}

TEST(Schedules, AGroupThatIsAddedTakesPartWithItsOwnRate) {
  auto optimizer = two_groups();
  LRScheduler scheduler(optimizer, exponential_lr(0.5));
  scheduler.step();
  optimizer.add_param_group(OptimizerParamGroup({at::zeros({2}).requires_grad_()}, std::make_unique<SGDOptions>(8.0)));
  scheduler.step();
  EXPECT_EQ(scheduler.get_last_lr(), (std::vector<double>{0.1 * 0.25, 0.037 * 0.25, 8 * 0.25}));
}

TEST(Schedules, GoOnFromACheckpoint) {
  TemporaryFolder folder;
  testing::run_ranks(2, [&](Context& context) {
    const auto make = [] { return warm_up(7, cosine_annealing_lr(20)); };
    auto straight = two_groups(), before = two_groups(), after = two_groups();
    LRScheduler expected(straight, make()), first(before, make());
    Checkpointer writer((folder.path() / "run").string(), context.group());
    writer.add("schedule", first);
    for (int step = 0; step < 12; ++step) expected.step(), first.step();
    writer.save(12);
    writer.finish();
    for (auto& group : after.param_groups()) group.options().set_lr(5);
    LRScheduler second(after, make());
    Checkpointer reader((folder.path() / "run").string(), context.group());
    reader.add("schedule", second);
    ASSERT_TRUE(reader.resume());
    EXPECT_EQ(second.steps(), 12);
    for (int step = 12; step < 30; ++step) {
      ASSERT_EQ(second.get_last_lr(), expected.get_last_lr()) << step;
      expected.step(), second.step();
    }
    torch::optim::SGD other({at::zeros({2}).requires_grad_()}, SGDOptions(0.1));
    LRScheduler third(other, make());
    EXPECT_NE(testing::failure([&] { third.load_state_dict(second.state_dict()); }).find("has 2 parameter groups"),
              std::string::npos);
    EXPECT_EQ(third.steps(), 0);
  });
}

}  // namespace
}  // namespace lockstep
