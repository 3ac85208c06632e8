#include <unistd.h>

#include <cstdio>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/assert_equal.h>
#include <lockstep/checkpoint.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "support/ranks.h"

// Steps that ranks share out, against each rank stepping its own copy by the same kernels: the same bits.

namespace lockstep {
namespace {

using testing::run_ranks;
using torch::optim::AdamOptions;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

/// `branch` is used in every other step, `never` by nobody, `frozen` does not train.
struct BranchingNet : torch::nn::Module {
  torch::Tensor forward(const torch::Tensor& input, int step) {
    torch::Tensor hidden = torch::tanh(first(input));
    if (step % 2 == 0) hidden = hidden + branch(input);
    return last(hidden) + frozen;
  }
  torch::nn::Linear first{register_module("first", torch::nn::Linear(20, 33))};
  torch::nn::Linear branch{register_module("branch", torch::nn::Linear(20, 33))};
  torch::nn::Linear never{register_module("never", torch::nn::Linear(3, 5))};
  torch::nn::Linear last{register_module("last", torch::nn::Linear(33, 7))};
  torch::Tensor frozen{register_parameter("frozen", torch::ones({7}), /*requires_grad=*/false)};
};
using Net = std::shared_ptr<BranchingNet>;

Net make_net(at::ScalarType type) {
  torch::manual_seed(3);
  auto net = std::make_shared<BranchingNet>();
  net->to(type);
  return net;
}

at::Tensor input_of(int rank, int step, at::ScalarType type) {
  return torch::sin(torch::arange(8 * 20, torch::kDouble).reshape({8, 20}) * (0.1 * (rank + 1)) + step).to(type);
}

/// Two groups, the second at another rate.
template <typename Options>
std::vector<OptimizerParamGroup> sharded_groups(BranchingNet& net, const Options& options) {
  Options other = options;
  other.lr(options.lr() * 0.5);
  std::vector<at::Tensor> weights, biases;
  for (const auto& item : net.named_parameters())
    if (item.value().requires_grad()) (item.value().dim() > 1 ? weights : biases).push_back(item.value());
  std::vector<OptimizerParamGroup> groups;
  groups.emplace_back(weights, std::make_unique<Options>(options));
  groups.emplace_back(biases, std::make_unique<Options>(other));
  return groups;
}

void train(DistributedDataParallel<Net>& model, torch::optim::Optimizer& optimizer, int rank, int begin, int end) {
  const at::ScalarType type = model.module()->first->weight.scalar_type();
  for (int step = begin; step < end; ++step) {
    optimizer.zero_grad();
    at::Tensor loss = model(input_of(rank, step, type), step).square().mean();
    if (step == 3 && rank == 1) loss = loss * NAN;  // a step that no rank takes
    loss.backward();
    model.clip_grad_norm(0.5);
    optimizer.step();
  }
}

void expect_same(const BranchingNet& mine, const BranchingNet& theirs) {
  const auto expected = theirs.named_parameters();
  for (const auto& item : mine.named_parameters()) EXPECT_TRUE(item.value().equal(expected[item.key()])) << item.key();
}

template <typename Optimizer, typename Options>
void compare_sharded(const Options& options, at::ScalarType type, ZeroRedundancyOptions with) {
  for (const int ranks : {1, 2, 3})
    run_ranks(ranks, [&](Context& context) {
      const Net mine = make_net(type), theirs = make_net(type);
      DistributedDataParallel model(mine, context), reference_model(theirs, context);
      model.set_non_finite_policy(NonFinitePolicy::kSkip);
      reference_model.set_non_finite_policy(NonFinitePolicy::kSkip);
      {
        ZeroRedundancyOptimizer sharded(model, sharded_groups(*mine, options), options, with);
        ZeroRedundancyOptimizer<Optimizer> reference(sharded_groups(*theirs, options), options,
                                                     {.master_weights = with.master_weights});
        for (const at::Tensor& parameter : mine->parameters())
          EXPECT_EQ(reinterpret_cast<uintptr_t>(parameter.const_data_ptr()) % 64, 0u);
        train(model, sharded, context.rank(), 0, 20);
        train(reference_model, reference, context.rank(), 0, 20);
        expect_same(*mine, *theirs);
        const StateDict state = state_dict(sharded), expected = state_dict(reference);
        ASSERT_EQ(state.keys(), expected.keys());
        for (const auto& item : expected) EXPECT_TRUE(item.value().equal(state[item.key()])) << item.key();
        context.group().barrier();
      }
      // Each has its own memory again.
      expect_same(*mine, *theirs);
      mine->first->bias.data().fill_(context.rank());
      context.group().barrier();
      EXPECT_EQ(mine->first->bias[0].item<double>(), context.rank());
    });
}

TEST(ShardedStep, HasTheBitsOfEachRankAlone) {
  for (const bool shared : {false, true}) {
    const ZeroRedundancyOptions with{.shared_parameters = shared};
    compare_sharded<torch::optim::SGD>(SGDOptions(0.05).momentum(0.9).weight_decay(1e-3), at::kFloat, with);
    compare_sharded<torch::optim::AdamW>(AdamWOptions(1e-2).amsgrad(true), at::kDouble, with);
    compare_sharded<torch::optim::AdamW>(AdamWOptions(1e-2), at::kBFloat16,
                                         {.shared_parameters = shared, .master_weights = true});
  }
}

/// `body` trains the model by the optimizer; whatever it does, the bits are those of each rank stepping alone.
template <typename Body>
void expect_same_training(int ranks, const DistributedDataParallelOptions& options, const Body& body) {
  for (const bool shared : {false, true})
    run_ranks(ranks, [&](Context& context) {
      const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
      DistributedDataParallel model(mine, context, options), reference_model(theirs, context, options);
      ZeroRedundancyOptimizer sharded(model, sharded_groups(*mine, AdamWOptions(1e-2)), AdamWOptions(1e-2),
                                      {.shared_parameters = shared});
      ZeroRedundancyOptimizer<torch::optim::AdamW> reference(sharded_groups(*theirs, AdamWOptions(1e-2)),
                                                             AdamWOptions(1e-2));
      body(model, sharded, context);
      body(reference_model, reference, context);
      expect_same(*mine, *theirs);
      EXPECT_FALSE(mine->first->weight.equal(make_net(at::kFloat)->first->weight)) << "nothing was trained";
      context.group().barrier();
    });
}

void backward_of(DistributedDataParallel<Net>& model, int rank, int step) {
  model(input_of(rank, step, at::kFloat), step).square().mean().backward();
}

using ShardedModel = DistributedDataParallel<Net>;
using AnyOptimizer = torch::optim::Optimizer;

TEST(ShardedStep, FollowsAccumulation) {
  for (const int ranks : {2, 3})
    expect_same_training(ranks, {}, [](ShardedModel& model, AnyOptimizer& optimizer, Context& context) {
      const auto accumulation = model.accumulate(3);
      for (int step = 0; step < 12; ++step) {
        backward_of(model, context.rank(), step);
        if (!accumulation.complete()) continue;
        optimizer.step();
        optimizer.zero_grad();
      }
    });
}

TEST(ShardedStep, FollowsWeightedMeans) {
  for (const int ranks : {2, 4})
    expect_same_training(ranks, {.reduction = GradientReduction::kWeightedMean},
                         [](ShardedModel& model, AnyOptimizer& optimizer, Context& context) {
                           for (int step = 0; step < 6; ++step) {
                             optimizer.zero_grad();
                             model.set_weight((context.rank() + step) % 3);
                             backward_of(model, context.rank(), step);
                             optimizer.step();
                           }
                         });
}

TEST(ShardedStep, FollowsHooksAndChecksOfReplicas) {
  for (const int ranks : {2, 3})
    expect_same_training(ranks, {}, [](ShardedModel& model, AnyOptimizer& optimizer, Context& context) {
      model.register_comm_hook(bf16_compress_hook());
      model.check_divergence_every(2);
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        backward_of(model, context.rank(), step);
        optimizer.step();
      }
      model.check_divergence();
    });
}

TEST(ShardedStep, FollowsAGradScaler) {
  for (const int ranks : {2, 3})
    expect_same_training(ranks, {}, [](ShardedModel& model, AnyOptimizer& optimizer, Context& context) {
      GradScaler scaler(context.group(), {.init_scale = 1024});
      for (int step = 0; step < 6; ++step) {
        optimizer.zero_grad();
        at::Tensor loss = model(input_of(context.rank(), step, at::kFloat), step).square().mean();
        if (step == 2 && context.rank() == 1) loss = loss * INFINITY;  // a step that no rank takes
        scaler.scale(loss).backward();
        scaler.step(optimizer);
        scaler.update();
      }
      EXPECT_EQ(scaler.get_scale(), 512);
    });
}

TEST(ShardedStep, FollowsARefreshThatFindsNothingNew) {
  for (const int ranks : {2, 3})
    expect_same_training(ranks, {}, [](ShardedModel& model, AnyOptimizer& optimizer, Context& context) {
      for (int step = 0; step < 6; ++step) {
        if (step == 3) model.refresh();
        optimizer.zero_grad();
        backward_of(model, context.rank(), step);
        optimizer.step();
      }
    });
}

TEST(ShardedStep, ResumesOnAnotherNumberOfRanks) {
  const std::string path = ::testing::TempDir() + "sharded_step_test_" + std::to_string(getpid()) + ".pt";
  const auto options = AdamWOptions(1e-2);
  for (const bool shared : {false, true}) {
    run_ranks(2, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, options, {.shared_parameters = shared});
      train(model, optimizer, context.rank(), 10, 15);
      if (context.rank() == 0) save_object(optimizer_state_dict(optimizer), path);
    });
    run_ranks(3, [&](Context& context) {
      const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
      DistributedDataParallel model(mine, context), reference_model(theirs, context);
      ZeroRedundancyOptimizer optimizer(model, options, {.shared_parameters = shared});
      const c10::IValue state = load_object(path);
      load_optimizer_state_dict(optimizer, state);
      train(model, optimizer, context.rank(), 10, 15);
      std::vector<at::Tensor> trained;
      for (const at::Tensor& parameter : theirs->parameters())
        if (parameter.requires_grad()) trained.push_back(parameter);
      ZeroRedundancyOptimizer<torch::optim::AdamW> alone(trained, options);
      load_optimizer_state_dict(alone, state);
      train(reference_model, alone, context.rank(), 10, 15);
      expect_same(*mine, *theirs);
    });
  }
  std::remove(path.c_str());
}

TEST(ShardedStep, SharedParametersAreEverybodys) {
  for (const int ranks : {2, 3})
    run_ranks(ranks, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      Ema ema(*net);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2), {.shared_parameters = true});
      if (context.rank() == 1) net->last->bias.data().fill_(7);
      context.group().barrier();
      EXPECT_EQ(net->last->bias[0].item<float>(), 7);
      context.group().barrier();
      EXPECT_THROW(model.average_parameters(), c10::Error);
      EXPECT_THROW((void)ema.averaged_weights(), c10::Error);
      model.broadcast_parameters();
      EXPECT_EQ(net->last->bias[0].item<float>(), 7);
      context.group().barrier();
    });
}

/// What step() says on each rank after `spoil`.
template <typename Spoil>
void expect_refusal(const std::string& part, const Spoil& spoil) {
  for (const int ranks : {2, 3})
    run_ranks(ranks, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      const at::Tensor before = net->last->weight.detach().clone();
      std::string text;
      try {
        model(input_of(context.rank(), 0, at::kFloat), 0).square().mean().backward();
        spoil(context.rank(), model, optimizer);
        optimizer.step();
      } catch (const std::exception& error) {
        text = error.what();
      }
      EXPECT_NE(text.find(part), std::string::npos) << text;
      EXPECT_TRUE(net->last->weight.equal(before));
      context.group().barrier();
    });
}

TEST(ShardedStep, AllRanksRefuseWhatOneCannotDo) {
  using Model = DistributedDataParallel<Net>;
  using Optimizer = torch::optim::Optimizer;
  expect_refusal("rank 1 would step other parameters than rank 0, at another rate", [](int rank, Model&, Optimizer& o) {
    if (rank == 1) o.param_groups()[0].options().set_lr(1);
  });
  expect_refusal("rank 1 would step other parameters than rank 0", [](int rank, Model& model, Optimizer&) {
    if (rank == 1) model.module()->first->bias.mutable_grad().reset();
  });
  expect_refusal("rank 1 has other gradients than rank 0", [](int rank, Model& model, Optimizer&) {
    if (rank == 1) model.module()->first->bias.mutable_grad() = at::ones({33});
  });
  expect_refusal("of 1 backward passes wait in .grad", [](int rank, Model& model, Optimizer&) {
    const auto local = model.no_sync();
    model(input_of(rank, 0, at::kFloat), 0).square().mean().backward();
  });
  expect_refusal("rank 1: ZeroRedundancyOptimizer: parameter first.bias no longer lies",
                 [](int rank, Model& m, Optimizer&) {
                   if (rank == 1) m.module()->first->bias.set_data(at::ones({33}));
                 });
  expect_refusal("was added to its groups after it was made", [](int, Model&, Optimizer& optimizer) {
    optimizer.add_param_group(OptimizerParamGroup({at::ones({2})}));
  });
  expect_refusal("within join()", [](int rank, Model& model, Optimizer& optimizer) {
    optimizer.zero_grad();
    model.join([&] {
      model(input_of(rank, 0, at::kFloat), 0).square().mean().backward();
      optimizer.step();
    });
  });
}

TEST(ShardedStep, RefusesWhatItCannotShareOut) {
  const auto failure = [](const auto& body) -> std::string {
    try {
      body();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "";
  };
  run_ranks(testing::Engine{2, "gloo"}, [&](Context& context) {
    const Net net = make_net(at::kFloat);
    DistributedDataParallel model(net, context);
    EXPECT_NE(failure([&] { ZeroRedundancyOptimizer(model, AdamWOptions(1e-2)); }).find("this group's engine is gloo"),
              std::string::npos);
  });
  run_ranks(2, [&](Context& context) {
    const Net net = make_net(at::kFloat);
    DistributedDataParallel model(net, context);
    EXPECT_NE(failure([&] {
                ZeroRedundancyOptimizer(model, torch::optim::RMSpropOptions(1e-2));
              }).find("SGD, Adam and AdamW"),
              std::string::npos);
    std::vector<OptimizerParamGroup> groups;
    groups.emplace_back(std::vector<at::Tensor>{net->first->weight});
    EXPECT_NE(failure([&] {
                ZeroRedundancyOptimizer(model, groups, AdamWOptions(1e-2));
              }).find("in none of the parameter groups"),
              std::string::npos);
  });
}

}  // namespace
}  // namespace lockstep
