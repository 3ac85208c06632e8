#include <cmath>
#include <limits>
#include <optional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/zero_redundancy_optimizer.h>

#include "collectives/gloo/gloo_backend.h"
#include "collectives/group_state.h"
#include "optim/branching_net.h"
#include "optim/sharded_step.h"
#include "support/ranks.h"

// Steps that take the sum of all ranks' gradients themselves, against gradients that backward reduces.

namespace lockstep::gradient_sum_test {
namespace {

using testing::expect_same;
using testing::loss_of;
using testing::make_net;
using testing::Net;
using testing::run_ranks;
using testing::sharded_groups;
using testing::ShardedModel;
using torch::optim::AdamW;
using torch::optim::AdamWOptions;
using Optimizer = torch::optim::Optimizer;

const testing::Engine kEngines[] = {{2, "shm"}, {3, "shm"}, {3, "gloo"}};

/// `body` trains a model by an optimizer that sums gradients itself and one by an optimizer on each rank; both must
/// come to the same bits, and tell the same.
template <typename Body>
void expect_same_bits(const Body& body, const DistributedDataParallelOptions& options = {},
                      const std::vector<int>& worlds = {2, 3}) {
  for (const int ranks : worlds)
    for (const testing::Way& way : testing::ways_of(ranks))
      run_ranks(way.engine, [&](Context& context) {
        const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
        ShardedModel model(mine, context, options), reference(theirs, context, options);
        const AdamWOptions defaults(1e-2);
        ZeroRedundancyOptimizer sharded(model, sharded_groups(*mine, defaults), defaults,
                                        {.shared_parameters = way.shared});
        ZeroRedundancyOptimizer<AdamW> alone(sharded_groups(*theirs, defaults), defaults);
        const std::vector<double> told = body(model, sharded, context), expected = body(reference, alone, context);
        EXPECT_EQ(told, expected);
        expect_same(*mine, *theirs);
        EXPECT_FALSE(mine->first->weight.equal(make_net(at::kFloat)->first->weight)) << "nothing was trained";
        context.group().barrier();
      });
}

TEST(GradientSum, UntilTheStepGradientsAreTheRanksOwn) {
  for (const testing::Engine& engine : kEngines)
    run_ranks(engine, [](Context& context) {
      const Net net = make_net(at::kFloat), alone = make_net(at::kFloat);
      ShardedModel model(net, context);
      const ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      loss_of(model, context.rank(), 1).backward();
      alone->forward(testing::input_of(context.rank(), 1, at::kFloat), 1).square().mean().backward();
      EXPECT_TRUE(net->first->weight.grad().equal(alone->first->weight.grad()));
      EXPECT_FALSE(net->branch->weight.grad().defined());
      context.group().barrier();
    });
}

TEST(GradientSum, NormsHaveTheSameBits) {
  expect_same_bits(
      [](ShardedModel& model, Optimizer& optimizer, Context& context) {
        std::vector<double> norms;
        for (const double type : {2.0, 1.0, 3.5, std::numeric_limits<double>::infinity()})
          for (const double largest : {1e-3, 1e3}) {
            optimizer.zero_grad();
            loss_of(model, context.rank(), static_cast<int>(norms.size())).backward();
            norms.push_back(model.clip_grad_norm(largest, type));
            norms.push_back(model.clip_grad_norm(largest / 2, 2));  // of what the first has left
            EXPECT_GT(norms.back(), 0);
            optimizer.step();
          }
        return norms;
      },
      {}, {2, 3, 4});
}

TEST(GradientSum, GradientsThatAreKeptAddUp) {
  for (const testing::Engine& engine : kEngines)
    run_ranks(engine, [](Context& context) {
      const Net mine = make_net(at::kDouble), theirs = make_net(at::kDouble);
      ShardedModel model(mine, context), reference(theirs, context);
      const AdamWOptions defaults(1e-2);
      ZeroRedundancyOptimizer made(model, sharded_groups(*mine, defaults), defaults);
      ZeroRedundancyOptimizer sharded(std::move(made));
      ZeroRedundancyOptimizer<AdamW> alone(sharded_groups(*theirs, defaults), defaults);
      for (int step = 0; step < 6; ++step) {
        if (step == 4) sharded.zero_grad(/*set_to_none=*/false), alone.zero_grad(/*set_to_none=*/false);
        loss_of(model, context.rank(), step).backward();
        loss_of(reference, context.rank(), step).backward();
        sharded.step(), alone.step();
      }
      const auto expected = theirs->named_parameters();
      for (const auto& item : mine->named_parameters())
        EXPECT_TRUE(item.value().allclose(expected[item.key()], 1e-9, 1e-11)) << item.key();
      context.group().barrier();
    });
}

TEST(GradientSum, TakesGradientsThatNoBackwardHasMade) {
  expect_same_bits([](ShardedModel& model, Optimizer& optimizer, Context&) {
    for (const auto& item : model.module()->named_parameters())
      if (item.value().requires_grad()) item.value().mutable_grad() = at::full_like(item.value(), 0.5);
    for (int step = 0; step < 3; ++step) optimizer.step();
    return std::vector<double>{};
  });
}

struct BadBatch {};

TEST(GradientSum, RanksMaySkipAndBackwardsMayFail) {
  expect_same_bits([](ShardedModel& model, Optimizer& optimizer, Context& context) {
    const int last = context.world_size() - 1;
    for (int step = 0; step < 8; ++step) {
      optimizer.zero_grad();
      try {
        at::Tensor loss = loss_of(model, context.rank(), step);
        if (step == 2 && context.rank() == last) throw BadBatch();
        if (step == 4) throw BadBatch();  // on all ranks: no step
        if (step == 5 && context.rank() == 0) {
          loss.register_hook([](const at::Tensor&) -> at::Tensor { throw BadBatch(); });
        }
        loss.backward();
      } catch (const BadBatch&) {
        model.skip_step();
      }
      if (step > 5) model.clip_grad_norm(0.1);
      optimizer.step();
    }
    return std::vector<double>{static_cast<double>(model.skipped_steps())};
  });
}

TEST(GradientSum, RanksMayRunOutOfInputs) {
  for (const bool clips : {false, true})
    for (const bool by_initial : {false, true})
      expect_same_bits([&](ShardedModel& model, Optimizer& optimizer, Context& context) {
        const auto end_step = [&] {
          if (clips) model.clip_grad_norm(0.1);
          optimizer.step();
          optimizer.zero_grad();
          for (auto& group : optimizer.param_groups()) group.options().set_lr(group.options().get_lr() * 0.9);
        };
        model.join(
            [&] {
              for (int step = 0; step < 2 + 2 * context.rank(); ++step) {
                loss_of(model, context.rank(), step).backward();
                end_step();
              }
            },
            {.divide_by_initial_world_size = by_initial, .shadow = end_step});
        optimizer.zero_grad();
        loss_of(model, context.rank(), 1).backward();
        optimizer.step();
        return std::vector<double>{};
      });
}

TEST(GradientSum, RanksThatRanOutOfInputsNeedNotCallStep) {
  for (const testing::Engine& engine : kEngines)
    run_ranks(engine, [](Context& context) {
      const Net mine = make_net(at::kFloat), theirs = make_net(at::kFloat);
      ShardedModel model(mine, context), reference(theirs, context);
      ZeroRedundancyOptimizer sharded(model, AdamWOptions(1e-2));
      ZeroRedundancyOptimizer<AdamW> alone(sharded_groups(*theirs, AdamWOptions(1e-2)), AdamWOptions(1e-2));
      for (auto& group : alone.param_groups()) group.options().set_lr(1e-2);
      const auto train = [&](ShardedModel& one, Optimizer& optimizer) {
        for (int step = 0; step < 5 - context.rank(); ++step) {
          optimizer.zero_grad();
          loss_of(one, context.rank(), step).backward();
          one.clip_grad_norm(0.1);
          optimizer.step();
        }
      };
      int rounds = 0;
      model.join([&] { train(model, sharded); }, {.shadow = [&] { ++rounds; }});
      reference.join([&] { train(reference, alone); }, {.shadow = [&] {
                       reference.clip_grad_norm(0.1);
                       alone.step();
                     }});
      EXPECT_EQ(rounds, context.rank());
      expect_same(*mine, *theirs);
      context.group().barrier();
    });
}

TEST(GradientSum, HooksComeAndGo) {
  expect_same_bits([](ShardedModel& model, Optimizer& optimizer, Context& context) {
    for (int step = 0; step < 6; ++step) {
      if (step == 2) model.register_comm_hook(bf16_compress_hook());
      if (step == 4) model.register_comm_hook(nullptr);
      optimizer.zero_grad();
      loss_of(model, context.rank(), step).backward();
      optimizer.step();
    }
    return std::vector<double>{};
  });
}

TEST(GradientSum, FollowsARefreshThatFreezesAndABufferOfSums) {
  expect_same_bits(
      [](ShardedModel& model, Optimizer& optimizer, Context& context) {
        for (int step = 0; step < 6; ++step) {
          optimizer.zero_grad();
          if (step == 3) {
            model.module()->first->bias.set_requires_grad(false);
            model.refresh();
          }
          loss_of(model, context.rank(), step).backward();
          optimizer.step();
        }
        return std::vector<double>{};
      },
      {.first_bucket_cap_mb = 1e-3, .bucket_cap_mb = 1e-3, .reduction = GradientReduction::kSum});
}

TEST(GradientSum, AnErrorInAGradientLeavesTheModelAsItWas) {
  for (const testing::Engine& engine : kEngines)
    run_ranks(engine, [](Context& context) {
      const Net net = make_net(at::kFloat);
      ShardedModel model(net, context);
      model.set_non_finite_policy(NonFinitePolicy::kRaise);
      ZeroRedundancyOptimizer older(model, AdamWOptions(1e-2));
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      for (int step = 0; step < 3; ++step) {
        optimizer.zero_grad();
        at::Tensor loss = loss_of(model, context.rank(), 0);
        if (step == 1 && context.rank() == 1) loss = loss * NAN;
        loss.backward();
        std::string text;
        const at::Tensor before = net->first->weight.detach().clone();
        try {
          optimizer.step();
        } catch (const Error& error) {
          text = error.what();
        }
        EXPECT_EQ(text.find("rank 1: the gradient of ") == 0, step == 1) << text;
        EXPECT_EQ(net->first->weight.equal(before), step == 1);
      }
      loss_of(model, context.rank(), 0).backward();
      try {
        older.step();
        ADD_FAILURE() << "a step by an optimizer that another one has replaced";
      } catch (const Error& error) {
        EXPECT_NE(std::string(error.what()).find("another one was made"), std::string::npos) << error.what();
      }
      context.group().barrier();
    });
}

TEST(GradientSum, ThreadsShareItOut) {
  for (const char* engine : {"shm", "gloo"})
    run_ranks(testing::Engine{2, engine}, [](Context& context) {
      at::set_num_threads(2);
      torch::manual_seed(7);
      const torch::nn::Linear mine(700, 801), theirs(700, 801);
      DistributedDataParallel model(mine, context), reference(theirs, context);
      reference.broadcast_parameters();
      {
        const at::NoGradGuard no_grad;
        mine->weight.copy_(theirs->weight), mine->bias.copy_(theirs->bias);
      }
      ZeroRedundancyOptimizer sharded(model, AdamWOptions(1e-2));
      ZeroRedundancyOptimizer<AdamW> alone(theirs->parameters(), AdamWOptions(1e-2));
      const at::Tensor input = torch::sin(torch::arange(3 * 700, at::kFloat).reshape({3, 700}) + context.rank());
      for (int step = 0; step < 3; ++step) {
        sharded.zero_grad(), alone.zero_grad();
        model(input).square().sum().backward(), reference(input).square().sum().backward();
        if (step > 0) {
          EXPECT_EQ(model.clip_grad_norm(1), reference.clip_grad_norm(1));
        }
        sharded.step(), alone.step();
      }
      EXPECT_TRUE(mine->weight.equal(theirs->weight) && mine->bias.equal(theirs->bias));
      context.group().barrier();
    });
}

/// In units of the parameters: each of n ranks' gradients is read once in all; parameters and s numbers of state are
/// read and written once, and with a copy on each rank the others' are written as well.
TEST(GradientSum, MovesNoMoreThanItMust) {
  for (const int ranks : {2, 4, 8})
    run_ranks(ranks, [](Context& context) {
      for (const bool shared : {true, false}) {
        const Net net = make_net(at::kFloat);
        ShardedModel model(net, context);
        AdamW optimizer(detail::trained_parameters(model), AdamWOptions(1e-2));
        detail::ShardedStep step(model, optimizer, {.formula = detail::FormulaKind::kAdamW},
                                 {.shared_parameters = shared});
        int64_t parameters = 0;
        for (const at::Tensor& parameter : {net->first->weight, net->first->bias, net->branch->weight,
                                            net->branch->bias, net->last->weight, net->last->bias})
          parameters += static_cast<int64_t>(parameter.nbytes());
        const int64_t n = context.world_size(), s = 2;
        const auto units = [&, before = int64_t{0}]() mutable {
          const at::Tensor bytes = at::scalar_tensor(step.bytes_moved() - before, at::kLong);
          before = step.bytes_moved();
          context.group().all_reduce(bytes);
          EXPECT_EQ(bytes.item<int64_t>() % parameters, 0);
          return bytes.item<int64_t>() / parameters;
        };
        auto moved = units;
        loss_of(model, context.rank(), 0).backward();
        step.step();
        EXPECT_EQ(moved(), n + 2 + 2 * s + (shared ? 0 : n - 1));
        loss_of(model, context.rank(), 0).backward();
        model.clip_grad_norm(1e-3);
        step.step();
        // The sums are written once and read once more.
        EXPECT_EQ(moved(), n + 2 + 2 + 2 * s + (shared ? 0 : n - 1));
        context.group().barrier();
      }
    });
}

/// Over Gloo a step sends what one all_reduce of the gradients does: each of N ranks sends (N - 1) / N of the gradients
/// to be added, and as much of the parameters. The rest is what ranks tell each other before a step.
TEST(GradientSum, SendsNoMoreThanAnAllReduce) {
  for (const int ranks : {2, 3, 4})
    run_ranks(testing::Engine{ranks, "gloo"}, [](Context& context) {
      torch::nn::Sequential net(torch::nn::Linear(1000, 1100), torch::nn::Linear(1100, 30));
      DistributedDataParallel model(net, context);
      ZeroRedundancyOptimizer optimizer(model, AdamWOptions(1e-2));
      const auto sent = [&, before = int64_t{0}]() mutable {
        const int64_t now = gloo_engine::bytes_sent(*state_of(context.group()).backend);
        return now - std::exchange(before, now);
      };
      auto count = sent;
      int64_t elements = 0;
      for (const at::Tensor& parameter : net->parameters()) elements += parameter.numel();
      (void)count();
      context.group().all_reduce(at::zeros({elements}));
      const int64_t of_all_reduce = count();
      EXPECT_NEAR(static_cast<double>(of_all_reduce),
                  8.0 * static_cast<double>(elements * (context.world_size() - 1)) / context.world_size(), 4096);
      for (const bool clips : {false, true}) {
        model(at::ones({2, 1000}) * context.rank()).square().mean().backward();
        EXPECT_EQ(count(), 0);
        if (clips) model.clip_grad_norm(0.1);
        optimizer.step();
        // Ranks tell each other some KiB, and slices are whole blocks of 8 KiB.
        EXPECT_LT(static_cast<double>(count()), 1.02 * static_cast<double>(of_all_reduce));
      }
      context.group().barrier();
    });
}

}  // namespace
}  // namespace lockstep::gradient_sum_test
