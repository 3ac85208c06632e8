#include <unistd.h>

#include <cstdio>
#include <filesystem>
#include <functional>
#include <sstream>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/lr_scheduler.h>
#include <lockstep/parameter_groups.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/ranks.h"

// Fused steps against LibTorch's optimizers.

namespace lockstep {
namespace {

using testing::run_ranks;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

using Tensors = std::vector<at::Tensor>;

constexpr int kSteps = 50;

template <typename Condition>
std::string failure_of(const Condition& condition) {
  try {
    condition();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

::testing::AssertionResult has(const std::string& text, const std::string& part) {
  return ::testing::AssertionResult(text.find(part) != std::string::npos)
         << "\"" << text << "\" and \"" << part << "\"";
}

/// A scalar, tails, one of several pieces, one whose elements lie in another order, an empty one, and one that is used
/// in every third step.
Tensors make_parameters(at::ScalarType type) {
  torch::manual_seed(7);
  Tensors parameters;
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{}, {3, 7}, {70, 1000}, {64, 33}, {0}, {129}})
    parameters.push_back(at::randn(shape, at::kDouble).to(type));
  parameters[3] = parameters[3].t();
  for (at::Tensor& parameter : parameters) parameter.requires_grad_();
  return parameters;
}

void set_gradients(const Tensors& parameters, int step) {
  torch::manual_seed(100 + static_cast<uint64_t>(step));
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = at::randn(parameters[i].sizes(), at::kDouble).to(parameters[i].scalar_type());
    if (i == 5 && step % 3 != 1) gradient.reset();
    Tensors(parameters)[i].mutable_grad() = gradient;
  }
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

template <typename Optimizer, typename Options>
void compare(const Options& options) {
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    const Tensors mine = make_parameters(type), theirs = make_parameters(type);
    ZeroRedundancyOptimizer<Optimizer> fused(groups_of(mine, options), options);
    Optimizer reference(groups_of(theirs, options), options);
    for (int step = 0; step < kSteps; ++step) {
      set_gradients(mine, step);
      set_gradients(theirs, step);
      fused.step();
      reference.step();
    }
    const double relative = type == at::kFloat ? 1e-5 : 1e-13, absolute = type == at::kFloat ? 4e-6 : 1e-14;
    for (size_t i = 0; i < mine.size(); ++i)
      EXPECT_TRUE(at::allclose(mine[i], theirs[i], relative, absolute))
          << "parameter " << i << " of " << type << ": " << (mine[i] - theirs[i]).abs().max().item<double>();
    const StateDict remembered = state_dict(fused), expected = state_dict(reference);
    ASSERT_EQ(remembered.keys(), expected.keys());
    for (const auto& item : expected) {
      EXPECT_TRUE(at::allclose(remembered[item.key()], item.value(), relative, absolute)) << item.key();
      EXPECT_EQ(remembered[item.key()].scalar_type(), item.value().scalar_type()) << item.key();
    }
  }
}

TEST(FusedStep, SgdIsLibTorchs) {
  compare<torch::optim::SGD>(SGDOptions(0.05));
  compare<torch::optim::SGD>(SGDOptions(0.05).weight_decay(0.1));
  compare<torch::optim::SGD>(SGDOptions(0.05).momentum(0.9));
  compare<torch::optim::SGD>(SGDOptions(0.05).momentum(0.9).dampening(0.4).weight_decay(0.01));
  compare<torch::optim::SGD>(SGDOptions(0.05).momentum(0.8).nesterov(true).weight_decay(0.01));
}

TEST(FusedStep, AdamIsLibTorchs) {
  compare<torch::optim::Adam>(AdamOptions(1e-2));
  compare<torch::optim::Adam>(AdamOptions(1e-2).weight_decay(0.1).betas({0.8, 0.95}).eps(1e-6));
  compare<torch::optim::Adam>(AdamOptions(1e-2).amsgrad(true));
}

TEST(FusedStep, AdamWIsLibTorchs) {
  compare<torch::optim::AdamW>(AdamWOptions(1e-2));
  compare<torch::optim::AdamW>(AdamWOptions(1e-2).weight_decay(0).betas({0.8, 0.95}).eps(1e-6));
  compare<torch::optim::AdamW>(AdamWOptions(1e-2).weight_decay(0.1).amsgrad(true));
}

TEST(FusedStep, OtherOptimizersStepAsTheyDo) {
  const Tensors mine = make_parameters(at::kFloat), theirs = make_parameters(at::kFloat);
  ZeroRedundancyOptimizer wrapped(mine, torch::optim::RMSpropOptions(1e-3).momentum(0.9));
  static_assert(std::is_base_of_v<torch::optim::RMSprop, decltype(wrapped)>);
  torch::optim::RMSprop reference(theirs, torch::optim::RMSpropOptions(1e-3).momentum(0.9));
  for (int step = 0; step < 10; ++step) {
    set_gradients(mine, step);
    set_gradients(theirs, step);
    wrapped.step();
    reference.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(mine[i].equal(theirs[i])) << i;
}

/// Steps of its own, which no kernel must replace.
struct Frozen : torch::optim::AdamW {
  using AdamW::AdamW;
  at::Tensor step(LossClosure) override { return at::scalar_tensor(3); }
};

TEST(FusedStep, AClassDerivedFromAnOptimizerKeepsItsStep) {
  const Tensors parameters = make_parameters(at::kFloat);
  ZeroRedundancyOptimizer<Frozen> optimizer(parameters, AdamWOptions(1));
  set_gradients(parameters, 0);
  EXPECT_EQ(optimizer.step().item<double>(), 3);
  EXPECT_TRUE(parameters[1].equal(make_parameters(at::kFloat)[1]));
}

template <typename Optimizer>
concept CanBeMade = requires {
  typename ZeroRedundancyOptimizer<Optimizer>;
};
static_assert(CanBeMade<torch::optim::AdamW> && !CanBeMade<torch::optim::LBFGS>);

TEST(FusedStep, ThreadsChangeNoBit) {
  Tensors results;
  for (const int threads : {1, 3}) {
    const int before = at::get_num_threads();
    at::set_num_threads(threads);
    const Tensors parameters = make_parameters(at::kFloat);
    ZeroRedundancyOptimizer optimizer(parameters, AdamWOptions(1e-2));
    for (int step = 0; step < 3; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
    at::set_num_threads(before);
    results.push_back(parameters[2].detach());
  }
  EXPECT_TRUE(results[0].equal(results[1]));
}

/// Nothing before the step uses more than one thread.
TEST(FusedStep, UsesThreads) {
  const auto threads = [] {
    using Entries = std::filesystem::directory_iterator;
    return std::distance(Entries("/proc/self/task"), Entries());
  };
  at::set_num_threads(1);
  const Tensors parameters = make_parameters(at::kFloat);
  ZeroRedundancyOptimizer optimizer(parameters, AdamWOptions(1e-2));
  set_gradients(parameters, 0);
  const auto before = threads();
  at::set_num_threads(3);
  optimizer.step();
  EXPECT_EQ(threads(), before + 2);
}

TEST(FusedStep, FollowsAScheduleAndAClosure) {
  const auto options = SGDOptions(0.1).momentum(0.9);
  const Tensors mine = make_parameters(at::kDouble), theirs = make_parameters(at::kDouble);
  ZeroRedundancyOptimizer fused(mine, options);
  torch::optim::SGD reference(theirs, options);
  LRScheduler schedule(fused, cosine_annealing_lr(20)), expected(reference, cosine_annealing_lr(20));
  for (int step = 0; step < 20; ++step) {
    const auto closure = [&](torch::optim::Optimizer& optimizer, const Tensors& parameters) {
      return [&] {
        optimizer.zero_grad();
        at::Tensor loss = at::zeros({}, at::kDouble);
        for (const at::Tensor& parameter : parameters) loss = loss + parameter.square().sum();
        loss.backward();
        return loss;
      };
    };
    const at::Tensor loss = fused.step(closure(fused, mine));
    EXPECT_NEAR(loss.item<double>(), reference.step(closure(reference, theirs)).item<double>(), 1e-6);
    schedule.step();
    expected.step();
  }
  for (size_t i = 0; i < mine.size(); ++i) EXPECT_TRUE(at::allclose(mine[i], theirs[i], 1e-12, 1e-13)) << i;
}

TEST(FusedStep, MakesGroupsLikeAnyOptimizer) {
  torch::nn::Linear net(3, 2);
  const auto options = AdamWOptions(1e-3).weight_decay(0.05);
  auto optimizer = make_optimizer<ZeroRedundancyOptimizer<torch::optim::AdamW>>(decay_groups(*net, options), options);
  ASSERT_EQ(optimizer.param_groups().size(), 2u);
  net->forward(at::ones({1, 3})).sum().backward();
  const at::Tensor bias = net->bias.detach().clone();
  optimizer.step();
  EXPECT_TRUE(at::allclose(net->bias, bias - 1e-3, 0, 1e-7));  // its first step is lr, and it does not decay
}

TEST(FusedStep, AStepIsAnEditToAutograd) {
  at::Tensor weight = at::ones({4}).requires_grad_();
  ZeroRedundancyOptimizer optimizer(Tensors{weight}, SGDOptions(0.1));
  const at::Tensor loss = weight.square().sum();
  loss.backward({}, /*retain_graph=*/true);
  optimizer.step();
  EXPECT_TRUE(has(failure_of([&] { loss.backward(); }), "modified by an inplace operation"));
}

/// Runs half of the steps, saves, loads into a new optimizer, and runs the rest; the parameters must be those of one
/// run.
template <typename Options>
void resume(at::ScalarType type, const Options& options, ZeroRedundancyOptions with) {
  const auto train = [&](torch::optim::Optimizer& optimizer, const Tensors& parameters, int begin, int end) {
    for (int step = begin; step < end; ++step) {
      set_gradients(parameters, step);
      optimizer.step();
    }
  };
  const Tensors whole = make_parameters(type), parted = make_parameters(type);
  ZeroRedundancyOptimizer without_break(whole, options, with), first(parted, options, with);
  train(without_break, whole, 0, 20);
  train(first, parted, 0, 10);
  std::stringstream file;
  const std::string path = ::testing::TempDir() + "fused_step_test_" + std::to_string(getpid()) + ".pt";
  save_object(optimizer_state_dict(first), path);
  ZeroRedundancyOptimizer second(parted, options, with);
  load_optimizer_state_dict(second, load_object(path));
  std::remove(path.c_str());
  train(second, parted, 10, 20);
  for (size_t i = 0; i < whole.size(); ++i) EXPECT_TRUE(whole[i].equal(parted[i])) << i << ", " << type;
}

TEST(FusedStep, ResumesFromAFile) {
  resume(at::kFloat, AdamWOptions(1e-2).amsgrad(true), {});
  resume(at::kDouble, SGDOptions(1e-2).momentum(0.9), {});
  resume(at::kBFloat16, AdamOptions(1e-2), {});
  for (const auto type : {at::kHalf, at::kBFloat16}) {
    resume(type, AdamWOptions(1e-3), {.master_weights = true});
    resume(type, SGDOptions(1e-3), {.master_weights = true});
    resume(type, SGDOptions(1e-3).momentum(0.9), {.master_weights = true});
  }
}

TEST(FusedStep, TakesOverFromLibTorchsOptimizerAndGivesBack) {
  const auto options = AdamWOptions(1e-2);
  const Tensors parameters = make_parameters(at::kFloat), alone = make_parameters(at::kFloat);
  torch::optim::AdamW before(parameters, options), reference(alone, options), after(parameters, options);
  ZeroRedundancyOptimizer fused(parameters, options);
  for (int step = 0; step < 30; ++step) {
    if (step == 10) load_state_dict(fused, state_dict(before));
    if (step == 20) load_state_dict(after, state_dict(fused));
    set_gradients(parameters, step);
    set_gradients(alone, step);
    step < 10 ? before.step() : step < 20 ? fused.step() : after.step();
    reference.step();
  }
  for (size_t i = 0; i < parameters.size(); ++i) EXPECT_TRUE(at::allclose(parameters[i], alone[i], 1e-5, 4e-6)) << i;
}

TEST(FusedStep, TorchSavesAndLoadsIt) {
  const Tensors parameters = make_parameters(at::kFloat);
  ZeroRedundancyOptimizer first(parameters, AdamWOptions(1e-2)), second(parameters, AdamWOptions(5e-2));
  set_gradients(parameters, 1);
  first.step();
  std::stringstream archive;
  torch::save(first, archive);
  torch::load(second, archive);
  const StateDict saved = state_dict(first), loaded = state_dict(second);
  ASSERT_EQ(saved.keys(), loaded.keys());
  for (const auto& item : saved) EXPECT_TRUE(item.value().equal(loaded[item.key()])) << item.key();
  second.step();
}

TEST(FusedStep, MastersAddUpStepsBelowTheLastBit) {
  for (const bool masters : {false, true}) {
    at::Tensor weight = at::ones({100}, at::TensorOptions(at::kBFloat16)).requires_grad_();
    ZeroRedundancyOptimizer optimizer(Tensors{weight}, SGDOptions(1e-4), {.master_weights = masters});
    for (int step = 0; step < 200; ++step) {
      weight.mutable_grad() = at::ones_like(weight);
      optimizer.step();
    }
    EXPECT_NEAR(weight[0].item<double>(), masters ? 0.98 : 1, 0.003);
  }
}

TEST(FusedStep, MastersOfASavedStateAreRefusedWhereNobodyKeepsThem) {
  const Tensors parameters = make_parameters(at::kBFloat16);
  ZeroRedundancyOptimizer keeper(parameters, AdamWOptions(1e-2), {.master_weights = true});
  torch::optim::AdamW plain(parameters, AdamWOptions(1e-2));
  set_gradients(parameters, 0);
  keeper.step();
  EXPECT_EQ(state_dict(keeper)["1.exp_avg"].scalar_type(), at::kFloat);
  EXPECT_EQ(state_dict(keeper)["1.master_param"].scalar_type(), at::kFloat);
  EXPECT_THROW(load_state_dict(plain, state_dict(keeper)), Error);
  plain.step();
  load_state_dict(keeper, state_dict(plain));  // masters start from the parameters
  keeper.step();
  EXPECT_TRUE(state_dict(keeper)["1.master_param"].to(at::kBFloat16).equal(parameters[1]));
}

TEST(FusedStep, RefusesWhatItCannotStep) {
  const auto refused = [](at::Tensor parameter, ZeroRedundancyOptions options = {}) {
    return failure_of([&] { ZeroRedundancyOptimizer(Tensors{parameter}, SGDOptions(0.1), options); });
  };
  EXPECT_TRUE(has(refused(at::zeros({2}, at::kComplexFloat)), "parameter 0 of group 0"));
  EXPECT_TRUE(has(refused(at::zeros({2, 3}, at::kMeta)), "is on the meta device"));
  EXPECT_TRUE(has(refused(at::zeros({2, 3}).narrow(1, 0, 2)), "gaps"));
  EXPECT_TRUE(has(failure_of([] {
                    ZeroRedundancyOptimizer(Tensors{at::zeros({2})}, torch::optim::RMSpropOptions(0.1),
                                            {.master_weights = true});
                  }),
                  "master_weights needs SGD, Adam or AdamW"));
}

TEST(FusedStep, AStepThatFailsChangesNothing) {
  torch::nn::Linear net(3, 2);
  torch::nn::Embedding table(torch::nn::EmbeddingOptions(4, 3).sparse(true));
  Tensors parameters = net->parameters();
  parameters.push_back(table->weight);
  ZeroRedundancyOptimizer optimizer(parameters, AdamWOptions(0.1));
  net->forward(table->forward(at::zeros({1}, at::kLong))).sum().backward();
  const at::Tensor before = net->weight.detach().clone(), bias = net->bias.detach().clone();
  EXPECT_TRUE(has(failure_of([&] { optimizer.step(); }), "parameter 2 of group 0, a CPUFloatType"));
  EXPECT_TRUE(net->weight.equal(before));
  EXPECT_TRUE(optimizer.state().empty());
  table->weight.mutable_grad() = at::zeros({4, 3});
  net->to(at::kDouble);  // gradients and state of another dtype than the parameters
  optimizer.step();
  EXPECT_EQ(net->bias.scalar_type(), at::kDouble);
  EXPECT_TRUE(at::allclose(net->bias, (bias * 0.999).to(at::kDouble) - 0.1, 1e-5, 1e-5));
}

TEST(FusedStep, StepsTheModelOfOneRank) {
  run_ranks(1, [](Context& context) {
    torch::nn::Linear net(3, 2);
    DistributedDataParallel model(net, context);
    ZeroRedundancyOptimizer optimizer(model, SGDOptions(0.1));
    const at::Tensor before = net->bias.detach().clone();
    model(at::ones({1, 3})).sum().backward();
    optimizer.step();
    EXPECT_TRUE(at::allclose(net->bias, before - 0.1));
  });
}

}  // namespace
}  // namespace lockstep
