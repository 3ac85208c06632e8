#include <gtest/gtest.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/has_state.h>

#include "data_parallel/divergence.h"
#include "data_parallel/models.h"
#include "support/ranks.h"

// Editing a model while it trains, buffers, uneven inputs, and the comparison of replicas.

namespace lockstep::replica_test {
namespace {

using namespace testing;  // NOLINT

class Replicas : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}, {3, "hierarchical", "aab"}};
INSTANTIATE_TEST_SUITE_P(Engines, Replicas, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

struct NetImpl : torch::nn::Module {
  NetImpl() {
    register_module("fc", fc);
    register_module("bn", bn);
    register_module("out", out);
    fill(*this);
  }
  at::Tensor forward(const at::Tensor& x) {
    at::Tensor hidden = bn(fc(x));
    if (!extra.is_empty()) hidden = extra(hidden);
    return out(torch::tanh(hidden));
  }
  torch::nn::Linear fc{6, 4}, extra{nullptr}, out{4, 3};
  torch::nn::BatchNorm1d bn{4};
};
TORCH_MODULE(Net);

bool equal_on_all(const Context& context, const torch::nn::Module& module) {
  const auto hashes = context.group().all_gather_bytes(hash(state_dict(module)));
  return std::all_of(hashes.begin(), hashes.end(), [&](const auto& other) { return other == hashes[0]; });
}

void train(Net& net, DistributedDataParallel<Net>& replica, torch::optim::Optimizer& optimizer, int step, int rank) {
  optimizer.zero_grad();
  const Sample sample = batch(step, rank);
  torch::mse_loss(replica(sample.data), sample.target).backward();
  optimizer.step();
  EXPECT_TRUE(net->fc->weight.grad().defined());
}

TEST_P(Replicas, AnObjectOnTheStackTrainsAsASharedOne) {
  run_ranks(GetParam(), [](Context& context) {
    NetImpl plain;
    Net shared;
    DistributedDataParallel replica(plain, context);
    DistributedDataParallel other(shared, context, {.bucket_cap_mb = 1});
    static_assert(HasReplicas<decltype(replica)>);
    EXPECT_EQ(&replica.module(), &plain);
    const auto train_both = [&](int step) {
      const Sample sample = batch(step, context.rank());
      torch::optim::SGD(plain.parameters(), 0.1).zero_grad();
      torch::optim::SGD(shared->parameters(), 0.1).zero_grad();
      torch::mse_loss(replica(sample.data), sample.target).backward();
      torch::mse_loss(other(sample.data), sample.target).backward();
      torch::optim::SGD(plain.parameters(), 0.1).step();
      torch::optim::SGD(shared->parameters(), 0.1).step();
      EXPECT_EQ(hash(state_dict(plain)), hash(state_dict(*shared))) << step;
      EXPECT_TRUE(equal_on_all(context, plain));
    };
    train_both(0);
    for (NetImpl* net : {&plain, shared.get()}) {
      net->extra = net->register_module("extra", torch::nn::Linear(4, 4));
      fill(*net->extra);
    }
    replica.refresh();
    other.refresh();
    train_both(1);
    EXPECT_TRUE(replica->extra->weight.grad().defined());
  });
}

std::string error_of(const std::function<void()>& what) {
  try {
    what();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void expect_error(const std::string& part, const std::function<void()>& what) {
  const std::string text = error_of(what);
  EXPECT_NE(text.find(part), std::string::npos) << text << "\nhas no\n" << part;
}

TEST_P(Replicas, ABiasChangedOnOneRankIsBroadcast) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context);
    const int last = context.world_size() - 1;
    if (context.rank() == last) at::NoGradGuard(), net->fc->bias.fill_(7), net->bn->running_mean.fill_(3);
    replica.broadcast_parameters(last);
    EXPECT_EQ(net->fc->bias[0].item<float>(), 7);
    EXPECT_EQ(net->bn->running_mean[0].item<float>(), 3);
    EXPECT_TRUE(equal_on_all(context, *net));
  });
}

TEST_P(Replicas, WhatEachRankChangesIsKeptUntilItIsAveraged) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    const int rank = context.rank(), n = context.world_size();
    at::NoGradGuard(), net->fc->bias.fill_(rank);
    train(net, replica, optimizer, 0, rank);
    train(net, replica, optimizer, 1, rank);
    const at::Tensor bias = context.group().all_gather(net->fc->bias.detach());
    for (int r = 0; r < n; ++r) EXPECT_TRUE(at::allclose(bias[r], bias[0] + r, 1e-5, 1e-5));
    // Weights 1, 2, 3: the mean of bias + 0, 1, 2.
    replica.average_parameters(rank + 1);
    double weights = 0, sum = 0;
    for (int r = 0; r < n; ++r) weights += r + 1, sum += r * (r + 1);
    EXPECT_TRUE(at::allclose(net->fc->bias, bias[0] + sum / weights, 1e-5, 1e-5));
    EXPECT_TRUE(equal_on_all(context, *net));
  });
}

TEST_P(Replicas, ALayerAddedReplacedFrozenAndRemoved) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    int step = 0;
    const auto trains = [&](const at::Tensor& parameter) {
      const at::Tensor before = parameter.detach().clone();
      for (int i = 0; i < 2; ++i) train(net, replica, optimizer, step++, context.rank());
      EXPECT_TRUE(equal_on_all(context, *net));
      return !at::equal(before, parameter);
    };
    torch::manual_seed(context.rank());
    net->extra = net->register_module("extra", torch::nn::Linear(4, 4));
    at::NoGradGuard(), net->out->bias.fill_(context.rank());  // not a new parameter, so it keeps its value
    replica.refresh();
    EXPECT_EQ(net->out->bias[0].item<float>(), context.rank());
    replica.broadcast_parameters();
    optimizer.add_param_group(net->extra->parameters());
    EXPECT_TRUE(trains(net->extra->weight));

    net->out = net->replace_module("out", torch::nn::Linear(4, 3));
    replica.refresh();
    optimizer.add_param_group(net->out->parameters());
    EXPECT_TRUE(trains(net->out->weight));

    net->extra->weight.set_requires_grad(false);
    net->extra->weight.mutable_grad() = at::Tensor();
    replica.refresh();
    EXPECT_FALSE(trains(net->extra->weight));
    net->extra->weight.set_requires_grad(true);
    replica.refresh();
    EXPECT_TRUE(trains(net->extra->weight));

    net->unregister_module("extra");
    net->extra = nullptr;
    replica.refresh();
    EXPECT_TRUE(trains(net->out->weight));
    net->register_module("nothing", torch::nn::ReLU());  // has no parameters, so it needs no refresh()
    EXPECT_TRUE(trains(net->out->weight));
  });
}

TEST_P(Replicas, AConvertedModelIsRefreshed) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context);
    net->to(at::kDouble);
    replica.refresh();
    replica(batch(0, context.rank(), at::kDouble).data).square().mean().backward();
    EXPECT_EQ(net->fc->weight.grad().scalar_type(), at::kDouble);
    const at::Tensor all = context.group().all_gather(net->fc->weight.grad());
    EXPECT_TRUE(at::equal(all[0], all[context.world_size() - 1]));
  });
}

TEST_P(Replicas, AListOfParametersIsRefreshedWithAnother) {
  run_ranks(GetParam(), [](Context& context) {
    const at::Tensor a = at::ones({2}).requires_grad_(), b = (at::ones({2}) * context.rank()).requires_grad_();
    DistributedDataParallel replica(NamedTensors{{"a", a}}, context);
    replica.refresh({{"a", a}, {"b", b}});
    EXPECT_EQ(b[0].item<float>(), 0);
    (a * b.exp() * (context.rank() + 1)).sum().backward();
    EXPECT_TRUE(at::allclose(b.grad(), at::full({2}, (context.world_size() + 1) / 2.0)));
  });
}

TEST_P(Replicas, BuffersFollowRankZeroOrTheMeanOrNobody) {
  run_ranks(GetParam(), [](Context& context) {
    for (const auto policy : {BufferPolicy::kFollowRankZero, BufferPolicy::kMean, BufferPolicy::kNone}) {
      Net net;
      DistributedDataParallel replica(net, context, {.buffers = policy});
      auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
      // After one step from mean 0, momentum 0.1: a tenth of each rank's batch mean.
      std::vector<at::Tensor> means;
      for (int rank = 0; rank < context.world_size(); ++rank)
        means.push_back(0.1 * net->fc(batch(0, rank).data).mean(0).detach());
      train(net, replica, optimizer, 0, context.rank());
      const at::Tensor expected = policy == BufferPolicy::kFollowRankZero ? means[0]
                                  : policy == BufferPolicy::kMean         ? at::stack(means).mean(0)
                                                                          : means[static_cast<size_t>(context.rank())];
      EXPECT_TRUE(at::allclose(net->bn->running_mean, expected, 1e-5, 1e-6));
      EXPECT_EQ(net->bn->num_batches_tracked.item<int64_t>(), 1);
    }
  });
}

TEST_P(Replicas, OneRankEvaluatesAlone) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      train(net, replica, optimizer, step, context.rank());
      if (!context.is_main()) continue;
      net->eval();
      at::NoGradGuard no_grad;
      EXPECT_EQ(replica(batch(step, 0).data).size(0), 4);
      net->train();
    }
    EXPECT_TRUE(equal_on_all(context, *net));
  });
}

/// Each rank has ten samples more than the rank before.
int inputs_of(int rank) { return 2 + 3 * rank; }

TEST_P(Replicas, JoinEqualsOneProcessWithWhateverInputsThereAre) {
  run_ranks(GetParam(), [](Context& context) {
    for (const bool initial : {true, false}) {
      Net net, reference;
      net->bn->eval();  // BuffersFollow tests batch statistics; here everything is exact
      reference->bn->eval();
      DistributedDataParallel replica(net, context);
      const auto sgd = torch::optim::SGDOptions(0.1).momentum(0.9);
      torch::optim::SGD optimizer(net->parameters(), sgd), alone(reference->parameters(), sgd);
      int64_t metric = 0;
      const auto count = [&](int64_t inputs) {
        const at::Tensor all = at::tensor({inputs}, at::kLong);
        context.group().all_reduce(all);
        metric += all.item<int64_t>();
      };
      const auto loop = [&] {
        for (int step = 0; step < inputs_of(context.rank()); ++step) {
          train(net, replica, optimizer, step, context.rank());
          count(1);
        }
      };
      replica.join(loop, {.divide_by_initial_world_size = initial, .shadow = [&] {
                            optimizer.step();
                            optimizer.zero_grad();
                            count(0);
                          }});
      for (int step = 0; step < inputs_of(context.world_size() - 1); ++step) {
        alone.zero_grad();
        int active = 0;
        for (int rank = 0; rank < context.world_size(); ++rank) active += step < inputs_of(rank) ? 1 : 0;
        for (int rank = 0; rank < context.world_size(); ++rank)
          if (step < inputs_of(rank))
            (torch::mse_loss(reference(batch(step, rank).data), batch(step, rank).target) /
             (initial ? context.world_size() : active))
                .backward();
        alone.step();
      }
      for (size_t i = 0; i < net->parameters().size(); ++i)
        EXPECT_TRUE(at::allclose(net->parameters()[i], reference->parameters()[i], 1e-4, 1e-5)) << i;
      EXPECT_TRUE(equal_on_all(context, *net));
      int total = 0;
      for (int rank = 0; rank < context.world_size(); ++rank) total += inputs_of(rank);
      EXPECT_EQ(metric, total);
      // Ranks that ran out kept updating their momentum, so the ranks stay equal when training goes on.
      train(net, replica, optimizer, 50, context.rank());
      EXPECT_TRUE(equal_on_all(context, *net));
    }
  });
}

TEST_P(Replicas, JoinWithBatchNormAndRankZeroFirstToEnd) {
  run_ranks(GetParam(), [](Context& context) {
    for (const auto policy : {BufferPolicy::kFollowRankZero, BufferPolicy::kMean}) {
      Net net;
      DistributedDataParallel replica(net, context, {.buffers = policy});
      auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
      int steps = 0;
      replica.join([&] {
        for (; steps < inputs_of(context.rank()); ++steps) train(net, replica, optimizer, steps, context.rank());
      });
      EXPECT_EQ(steps, inputs_of(context.rank()));
      EXPECT_EQ(net->bn->num_batches_tracked.item<int64_t>(), inputs_of(context.world_size() - 1));
      EXPECT_TRUE(equal_on_all(context, *net));
      replica.join([] {});  // no rank has inputs
      replica.join([&] { train(net, replica, optimizer, 60, context.rank()); }, {.enable = false});
    }
  });
}

TEST_P(Replicas, JoinEndsWhereTheFirstRankDoesIfAsked) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    Net net;
    DistributedDataParallel replica(net, context);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    expect_error("rank 0 ran out of inputs within join(throw_on_early_termination)", [&] {
      replica.join(
          [&] {
            for (int step = 0; step < inputs_of(context.rank()); ++step)
              train(net, replica, optimizer, step, context.rank());
          },
          {.throw_on_early_termination = true});
    });
    train(net, replica, optimizer, 70, context.rank());
  });
}

TEST_P(Replicas, DivergenceIsNamed) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    Net net;
    DistributedDataParallel replica(net, context);
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    replica.check_divergence_every(3);
    const int last = context.world_size() - 1;
    const std::string odd = std::to_string(last), rest = last == 1 ? "rank 0" : "ranks 0, 1";
    for (int step = 0; step < 7; ++step) train(net, replica, optimizer, step, context.rank());
    replica.check_divergence();
    if (context.rank() == last) at::NoGradGuard(), net->out->bias[1] += 1e-6;
    const std::string expected = "parameter out.bias on rank " + odd + " differs from that on " + rest;
    expect_error(expected, [&] { replica.check_divergence(); });
    train(net, replica, optimizer, 7, context.rank());  // the 8th
    expect_error(expected, [&] { train(net, replica, optimizer, 8, context.rank()); });
    replica.broadcast_parameters();
    if (context.rank() == last) net->bn->running_var[0] += 1;
    expect_error("buffer bn.running_var on rank " + odd, [&] { replica.check_divergence(); });
    replica.average_parameters();
    replica.check_divergence();
    replica.check_divergence_every(0);
  });
}

TEST_P(Replicas, BuffersOfTheirOwnAreNoDivergence) {
  run_ranks(GetParam(), [](Context& context) {
    Net net;
    DistributedDataParallel replica(net, context, {.buffers = BufferPolicy::kNone});
    auto optimizer = torch::optim::SGD(net->parameters(), 0.1);
    replica.check_divergence_every(1);
    for (int step = 0; step < 3; ++step) train(net, replica, optimizer, step, context.rank());
    EXPECT_EQ(equal_on_all(context, *net), context.world_size() == 1);
  });
}

TEST(HashOf, EveryBitInTheOrderOfIndices) {
  const at::Tensor tensor = formula({5, 7}, 3);
  EXPECT_EQ(hash_of(tensor), hash_of(tensor.t().contiguous().t()));
  EXPECT_NE(hash_of(tensor), hash_of(tensor.t()));
  for (int64_t i = 0; i < tensor.numel(); ++i)
    for (int bit = 0; bit < 64; bit += 9) {
      at::Tensor other = tensor.clone();
      other.view(-1).view(at::kLong)[i].bitwise_xor_(int64_t{1} << bit);
      EXPECT_NE(hash_of(tensor), hash_of(other)) << i << " " << bit;
    }
  EXPECT_NE(hash_of(at::zeros({3}, at::kByte)), hash_of(at::zeros({4}, at::kByte)));
  EXPECT_EQ(hash_of(at::empty({0})), hash_of(at::empty({0})));
}

}  // namespace
}  // namespace lockstep::replica_test
