#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
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

#include "optim/branching_net.h"
#include "support/ranks.h"

// Steps that ranks share out, against each rank stepping its own copy by the same kernels: the same bits.

namespace lockstep {
namespace {

using testing::expect_same;
using testing::input_of;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_ranks;
using testing::sharded_groups;
using testing::ShardedModel;
using torch::optim::AdamWOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::SGDOptions;

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

template <typename Optimizer, typename Options>
void compare_sharded(Context& context, const Options& options, at::ScalarType type, ZeroRedundancyOptions with) {
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
}

void compare_sharded(int ranks) {
  using torch::optim::AdamW;
  using torch::optim::SGD;
  for (const testing::Way& way : testing::ways_with_machines(ranks))
    run_ranks(way.engine, [&](Context& context) {
      const ZeroRedundancyOptions with{.shared_parameters = way.shared};
      compare_sharded<SGD>(context, SGDOptions(0.05).momentum(0.9).weight_decay(1e-3), at::kFloat, with);
      compare_sharded<AdamW>(context, AdamWOptions(1e-2).amsgrad(true), at::kDouble, with);
      compare_sharded<SGD>(context, SGDOptions(0.05).momentum(0.9), at::kHalf, with);
      compare_sharded<AdamW>(context, AdamWOptions(1e-2), at::kBFloat16,
                             {.shared_parameters = way.shared, .master_weights = true});
    });
}

TEST(ShardedStep, HasTheBitsOfEachRankAlone) {
  for (const int ranks : {1, 2, 3}) compare_sharded(ranks);
}

TEST(ShardedStep, HasTheBitsOfEachRankAloneOnFourRanks) { compare_sharded(4); }

/// `body` trains the model by the optimizer; whatever it does, the bits are those of each rank stepping alone.
template <typename Body>
void expect_same_training(int ranks, const DistributedDataParallelOptions& options, const Body& body) {
  for (const testing::Way& way : testing::ways_with_machines(ranks))
    run_ranks(way.engine, [&](Context& context) {
      const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
      DistributedDataParallel model(mine, context, options), reference_model(theirs, context, options);
      ZeroRedundancyOptimizer sharded(model, sharded_groups(*mine, AdamWOptions(1e-2)), AdamWOptions(1e-2),
                                      {.shared_parameters = way.shared});
      ZeroRedundancyOptimizer<torch::optim::AdamW> reference(sharded_groups(*theirs, AdamWOptions(1e-2)),
                                                             AdamWOptions(1e-2));
      body(model, sharded, context);
      body(reference_model, reference, context);
      expect_same(*mine, *theirs);
      EXPECT_FALSE(mine->first->weight.equal(make_net(at::kFloat)->first->weight)) << "nothing was trained";
      context.group().barrier();
    });
}

void backward_of(ShardedModel& model, int rank, int step) { loss_of(model, rank, step).backward(); }

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
  // From 2 ranks to 3; over Gloo from shared memory and back to it.
  const testing::Way from[] = {{{2, "shm"}, false}, {{2, "shm"}, true}, {{2, "shm"}, false}, {{2, "gloo"}, false}},
                     to[] = {{{3, "shm"}, false}, {{3, "shm"}, true}, {{3, "gloo"}, false}, {{3, "shm"}, true}};
  for (size_t i = 0; i < std::size(from); ++i) {
    run_ranks(from[i].engine, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, options, {.shared_parameters = from[i].shared});
      train(model, optimizer, context.rank(), 10, 15);
      const c10::IValue state = optimizer_state_dict(optimizer);
      if (context.rank() == 0) save_object(state, path);
      context.group().barrier();
    });
    run_ranks(to[i].engine, [&](Context& context) {
      const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
      DistributedDataParallel model(mine, context), reference_model(theirs, context);
      ZeroRedundancyOptimizer optimizer(model, options, {.shared_parameters = to[i].shared});
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

void fill(const at::Tensor& parameter, float value) {
  const at::NoGradGuard no_grad;
  parameter.fill_(value);
}

TEST(ShardedStep, SharedParametersAreEverybodys) {
  for (const testing::Engine& engine : {testing::Engine{2, "shm"}, {3, "shm"}, {4, "hierarchical", "aaab"}})
    run_ranks(engine, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      Ema ema(*net);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2), {.shared_parameters = true});
      if (context.rank() == 1) fill(net->last->bias, 7);
      context.group().barrier();
      const bool is_here = engine.machines.empty() || context.rank() < 3;  // a machine's parameters are its own
      EXPECT_EQ(net->last->bias[0].item<float>() == 7, is_here);
      context.group().barrier();
      EXPECT_THROW(model.average_parameters(), c10::Error);
      EXPECT_THROW((void)ema.averaged_weights(), c10::Error);
      context.group().barrier();
      model.broadcast_parameters(1);
      EXPECT_EQ(net->last->bias[0].item<float>(), 7);
      context.group().barrier();
    });
}

TEST(ShardedStep, SharedParametersMayBeChangedByOneRankOrByTheLibrary) {
  for (const testing::Engine& engine : {testing::Engine{2, "shm"}, {3, "shm"}, {4, "hierarchical", "aaab"}})
    run_ranks(engine, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2), {.shared_parameters = true});
      const auto step = [&] { train(model, optimizer, context.rank(), 0, 1); };
      step();
      const StateDict kept = state_dict(*net);
      if (context.rank() == 1) fill(net->last->bias, 7);
      context.group().barrier();
      model.broadcast_parameters(1);
      EXPECT_EQ(net->last->bias[0].item<float>(), 7);
      EXPECT_NO_THROW(step());
      load_state_dict(*net, kept);
      EXPECT_NO_THROW(step());
    });
}

/// How a child ends that reads a tensor's first element, and then writes it; 0: as it should.
int status_of_child_with(const at::Tensor& tensor) {
  const auto before = tensor.detach().cpu().flatten()[0].item<float>();
  const pid_t child = ::fork();
  if (child == 0) {
    std::signal(SIGSEGV, SIG_DFL);
    auto* const first = static_cast<volatile float*>(tensor.mutable_data_ptr());
    const bool is_seen = *first == before;
    *first = before + 1;
    ::_exit(is_seen ? 0 : 1);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  return status;
}

TEST(ShardedStep, AForkedChildSeesWhatIsTheRanksOwn) {
  for (const int ranks : {2, 3})
    run_ranks(ranks, [](Context& context) {
      for (const bool shared : {false, true}) {
        const Net net = make_net(at::kFloat);
        DistributedDataParallel model(net, context);
        const at::Tensor& weight = net->last->weight;
        {
          const ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2), {.shared_parameters = shared});
          const at::Tensor clone = weight.detach().clone();
          const bool is_anothers = shared && context.rank() != 0;
          EXPECT_EQ(status_of_child_with(weight) == 0, !is_anothers) << context.rank();
          EXPECT_EQ(status_of_child_with(clone), 0);
          EXPECT_TRUE(weight.equal(clone)) << "a child has written it";
          context.group().barrier();
        }
        EXPECT_EQ(status_of_child_with(weight), 0);  // it lies in memory of its own again
      }
    });
}

/// What step() says on each rank after `spoil`. `hooked`: backward reduces the gradients.
template <typename Spoil>
void expect_refusal(const std::string& part, const Spoil& spoil, bool hooked = false) {
  for (const testing::Engine& engine : {testing::Engine{2, "shm"}, {3, "shm"}, {3, "gloo"}})
    run_ranks(engine, [&](Context& context) {
      const Net net = make_net(at::kFloat);
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      const at::Tensor before = net->last->weight.detach().clone();
      std::string text;
      try {
        if (hooked) model.register_comm_hook(all_reduce_hook());
        backward_of(model, context.rank(), 0);
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
  expect_refusal("rank 1 would step other parameters than rank 0, at another rate",
                 [](int rank, ShardedModel&, AnyOptimizer& optimizer) {
                   if (rank == 1) optimizer.param_groups()[0].options().set_lr(1);
                 });
  expect_refusal("of 1 backward pass wait in .grad", [](int rank, ShardedModel& model, AnyOptimizer&) {
    const auto local = model.no_sync();
    backward_of(model, rank, 0);
  });
  expect_refusal("rank 1: ZeroRedundancyOptimizer: parameter first.bias is no longer",
                 [](int rank, ShardedModel& model, AnyOptimizer&) {
                   if (rank == 1) model.module()->first->bias.set_data(at::ones({33}));
                 });
  expect_refusal("was added to its groups after it was made", [](int, ShardedModel&, AnyOptimizer& optimizer) {
    optimizer.add_param_group(OptimizerParamGroup({at::ones({2})}));
  });
  expect_refusal("refresh() has found parameter frozen", [](int rank, ShardedModel& model, AnyOptimizer&) {
    model.module()->frozen.set_requires_grad(true);
    model.refresh();
    backward_of(model, rank, 0);
  });
  expect_refusal("rank 1 has called clip_grad_norm() with other arguments than rank 0",
                 [](int rank, ShardedModel& model, AnyOptimizer&) { model.clip_grad_norm(rank == 1 ? 1 : 2); });
  expect_refusal("rank 1 has called the other one of clip_grad_norm() and step()",
                 [](int rank, ShardedModel& model, AnyOptimizer& optimizer) {
                   rank == 1 ? static_cast<void>(model.clip_grad_norm(1)) : static_cast<void>(optimizer.step());
                 });
}

TEST(ShardedStep, WithAHookTheGradientsMustBeReduced) {
  expect_refusal(
      "rank 1 would step other parameters than rank 0",
      [](int rank, ShardedModel& model, AnyOptimizer&) {
        if (rank == 1) model.module()->first->bias.mutable_grad().reset();
      },
      /*hooked=*/true);
  expect_refusal(
      "rank 1 has other gradients than rank 0",
      [](int rank, ShardedModel& model, AnyOptimizer&) {
        if (rank == 1) model.module()->first->bias.mutable_grad() = at::ones({33});
      },
      /*hooked=*/true);
  expect_refusal(
      "within join() with a communication hook",
      [](int rank, ShardedModel& model, AnyOptimizer& optimizer) {
        optimizer.zero_grad();
        model.join([&] {
          backward_of(model, rank, 0);
          optimizer.step();
        });
      },
      /*hooked=*/true);
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
  run_ranks(2, [&](Context& context) {
    const Net net = make_net(at::kFloat);
    DistributedDataParallel model(net, context);
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
