#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sync_batch_norm.h>

#include "data_parallel/models.h"
#include "support/ranks.h"

// A rank that skips its share of a step, because its batch is bad. Expected: one process that adds up the losses of the
// ranks that took part.

namespace lockstep::skip_step_test {
namespace {

using namespace testing;  // NOLINT

class SkipStep : public ::testing::TestWithParam<Engine> {};
const Engine kEngines[] = {{1, ""}, {2, "shm"}, {3, "shm"}, {2, "gloo"}, {3, "gloo"}};
INSTANTIATE_TEST_SUITE_P(Engines, SkipStep, ::testing::ValuesIn(kEngines),
                         [](const auto& instance) { return name_of(instance.param); });

struct BadBatch : std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Fails { kNowhere, kInForward, kInBackward };

struct NetImpl : torch::nn::Module {
  NetImpl() {
    fill(*this);
    to(at::kDouble);
  }
  at::Tensor forward(const at::Tensor& x, Fails fails = Fails::kNowhere) {
    at::Tensor hidden = torch::tanh(fc2(torch::tanh(fc1(x))));
    if (fails == Fails::kInForward) throw BadBatch("in forward");
    // By then `out` has its gradients; the others have none.
    if (fails == Fails::kInBackward)
      hidden.register_hook([](const at::Tensor&) -> at::Tensor { throw BadBatch("in backward"); });
    return out(hidden);
  }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(6, 6))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(6, 6))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(6, 3))};
  torch::nn::Linear spare{register_module("spare", torch::nn::Linear(6, 3))};  // used only by some tests
};
TORCH_MODULE(Net);
using Replicated = DistributedDataParallel<Net>;

at::Tensor data(int step, int rank) { return batch(step, rank, at::kDouble).data; }

bool equal_on_all(const Context& context, const torch::nn::Module& module) {
  const auto hashes = context.group().all_gather_bytes(hash(state_dict(module)));
  return std::all_of(hashes.begin(), hashes.end(), [&](const auto& other) { return other == hashes[0]; });
}

void expect_equal_parameters(torch::nn::Module& actual, torch::nn::Module& expected) {
  for (const auto& item : expected.named_parameters())
    EXPECT_TRUE(at::allclose(actual.named_parameters()[item.key()], item.value(), 1e-12, 1e-14)) << item.key();
}

torch::optim::SGD sgd_of(torch::nn::Module& module) {
  return torch::optim::SGD(module.parameters(), torch::optim::SGDOptions(0.1).momentum(0.9).weight_decay(0.1));
}

/// One step of a program that skips bad batches.
void train(Replicated& replica, torch::optim::Optimizer& optimizer, int step, int rank, Fails fails) {
  optimizer.zero_grad();
  try {
    replica(data(step, rank), fails).square().mean().backward();
    EXPECT_EQ(fails, Fails::kNowhere);
  } catch (const BadBatch&) {
    replica.skip_step();
  }
  optimizer.step();
}

/// The same in one process, over the ranks that take part.
void train_alone(Net& net, torch::optim::Optimizer& optimizer, int step, const std::vector<int>& ranks) {
  optimizer.zero_grad();
  for (const int rank : ranks) (net(data(step, rank)).square().mean() / static_cast<double>(ranks.size())).backward();
  optimizer.step();
}

std::vector<int> all_but(int world_size, int skips) {
  std::vector<int> ranks;
  for (int rank = 0; rank < world_size; ++rank)
    if (rank != skips) ranks.push_back(rank);
  return ranks;
}

TEST_P(SkipStep, LeavesTheMeanOfTheOthers) {
  run_ranks(GetParam(), [](Context& context) {
    for (const Fails fails : {Fails::kInForward, Fails::kInBackward}) {
      Net net, reference;
      Replicated replica(net, context);
      auto optimizer = sgd_of(*net), alone = sgd_of(*reference);
      for (int step = 0; step < 6; ++step) {
        // Each rank skips once, two steps in a row, and then none.
        const int skips = step == 1 || step == 2 ? 0 : step == 3 ? context.world_size() - 1 : -1;
        train(replica, optimizer, step, context.rank(), skips == context.rank() ? fails : Fails::kNowhere);
        const auto ranks = all_but(context.world_size(), skips);
        if (!ranks.empty()) train_alone(reference, alone, step, ranks);
        expect_equal_parameters(*net, *reference);
        EXPECT_TRUE(equal_on_all(context, *net)) << "step " << step;
      }
      EXPECT_EQ(replica.skipped_steps(), context.world_size() == 1 ? 3 : 0);
    }
  });
}

TEST_P(SkipStep, OnAllRanksLeavesNothing) {
  run_ranks(GetParam(), [](Context& context) {
    Net net, reference;
    Replicated replica(net, context);
    auto optimizer = sgd_of(*net), alone = sgd_of(*reference);
    for (int step = 0; step < 4; ++step) {
      const Fails fails = step == 1 ? Fails::kInForward : step == 2 ? Fails::kInBackward : Fails::kNowhere;
      train(replica, optimizer, step, context.rank(), fails);
      if (fails == Fails::kNowhere) train_alone(reference, alone, step, all_but(context.world_size(), -1));
      for (const auto& parameter : net->out->parameters())
        EXPECT_EQ(parameter.grad().defined(), step == 0 || step == 3);
      expect_equal_parameters(*net, *reference);
      EXPECT_TRUE(equal_on_all(context, *net));
    }
    EXPECT_EQ(replica.skipped_steps(), 2);
  });
}

/// Buckets of the failed backward have already been sent: the step is void, and leaves nothing behind.
TEST_P(SkipStep, AfterABucketWasSentIsEveryonesStep) {
  run_ranks(GetParam(), [](Context& context) {
    Net net, reference;
    net->spare->weight.set_requires_grad(false);
    net->spare->bias.set_requires_grad(false);
    Replicated replica(net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5});
    auto optimizer = sgd_of(*net), alone = sgd_of(*reference);
    for (int step = 0; step < 6; ++step) {
      const int skips = step == 1 ? context.world_size() - 1 : step == 3 ? 0 : -1;
      train(replica, optimizer, step, context.rank(), skips == context.rank() ? Fails::kInBackward : Fails::kNowhere);
      for (const auto& parameter : net->fc1->parameters()) EXPECT_EQ(parameter.grad().defined(), skips < 0);
      if (skips < 0) train_alone(reference, alone, step, all_but(context.world_size(), -1));
      expect_equal_parameters(*net, *reference);
      EXPECT_TRUE(equal_on_all(context, *net));
    }
    EXPECT_EQ(replica.skipped_steps(), 2);
  });
}

/// Two passes per step. The bad one is the first or the second of rank 0; in both cases neither of them may count.
TEST_P(SkipStep, DropsAllPassesOfAnAccumulation) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    for (const int bad : {0, 1}) {
      Net net, reference;
      Replicated replica(net, context);
      const auto accumulation = replica.accumulate(2);
      for (int pass = 0; pass < 2; ++pass) {
        try {
          const Fails fails = context.rank() == 0 && pass == bad ? Fails::kInBackward : Fails::kNowhere;
          replica(data(pass, context.rank()), fails).square().mean().backward();
        } catch (const BadBatch&) {
          replica.skip_step();
          break;
        }
      }
      EXPECT_TRUE(accumulation.complete());
      const auto ranks = all_but(context.world_size(), 0);
      for (int pass = 0; pass < 2; ++pass)
        for (const int rank : ranks)
          (reference(data(pass, rank)).square().mean() / static_cast<double>(ranks.size())).backward();
      for (const auto& item : reference->named_parameters()) {
        const at::Tensor gradient = net->named_parameters()[item.key()].grad();
        ASSERT_EQ(gradient.defined(), item.value().grad().defined()) << item.key();
        if (!gradient.defined()) continue;
        EXPECT_TRUE(at::allclose(gradient, item.value().grad(), 1e-12, 1e-14)) << item.key();
      }
    }
  });
}

/// What .grad held before the step stays, even on the rank that skips, although its failed backward added to it.
TEST_P(SkipStep, LeavesWhatNobodyReachedAsItWas) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    for (const bool to_none : {true, false}) {
      Net net;
      Replicated replica(net, context);
      const bool skips = context.rank() == context.world_size() - 1;
      // The first step fills .grad of `spare`; in the second only the failed backward reaches it.
      net->spare(data(0, context.rank())).sum().backward();
      const at::Tensor before = net->spare->weight.grad().clone();
      if (to_none) net->zero_grad();
      try {
        at::Tensor loss = replica(data(1, context.rank()), skips ? Fails::kInBackward : Fails::kNowhere).sum();
        if (skips) loss = loss + net->spare(data(1, context.rank())).sum();
        loss.backward();
      } catch (const BadBatch&) {
        replica.skip_step();
      }
      const at::Tensor& after = net->spare->weight.grad();
      ASSERT_EQ(after.defined(), !to_none);
      EXPECT_TRUE(to_none || at::equal(after, before));
    }
  });
}

TEST_P(SkipStep, WithSumsAndWeights) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    for (const auto reduction : {GradientReduction::kSum, GradientReduction::kWeightedMean}) {
      const bool weighted = reduction == GradientReduction::kWeightedMean;
      for (const int skips : {0, context.world_size() - 1}) {
        Net net, reference;
        Replicated replica(net, context, {.reduction = reduction});
        if (weighted) replica.set_weight(context.rank() + 1);
        auto optimizer = sgd_of(*net);
        train(replica, optimizer, 0, context.rank(), skips == context.rank() ? Fails::kInBackward : Fails::kNowhere);
        double total = 0;
        const auto ranks = all_but(context.world_size(), skips);
        for (const int rank : ranks) total += rank + 1;
        for (const int rank : ranks)
          (reference(data(0, rank)).square().mean() * (weighted ? (rank + 1) / total : 1)).backward();
        sgd_of(*reference).step();
        expect_equal_parameters(*net, *reference);
        EXPECT_TRUE(equal_on_all(context, *net));
      }
    }
  });
}

/// A batch with NaN leaves NaN in a batch norm's running mean, on whatever rank it is.
TEST_P(SkipStep, KeepsBuffersOfABadBatchOut) {
  struct Normed : torch::nn::Module {
    torch::nn::BatchNorm1d bn{register_module("bn", torch::nn::BatchNorm1d(6))};
  };
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    for (const auto policy : {BufferPolicy::kFollowRankZero, BufferPolicy::kMean}) {
      auto normed = std::make_shared<Normed>();
      DistributedDataParallel replica(normed, context, {.buffers = policy});
      const bool skips = context.rank() == 0;
      at::Tensor input = batch(0, context.rank()).data;
      if (skips) input[0][0] = std::nan("");
      const at::Tensor loss = normed->bn(input).square().sum();
      skips ? replica.skip_step() : loss.backward();
      EXPECT_TRUE(at::isfinite(normed->bn->running_mean).all().item<bool>());
      EXPECT_TRUE(equal_on_all(context, *normed));
    }
  });
}

TEST_P(SkipStep, WithinJoin) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    for (const bool synchronized : {false, true}) {
      auto net = std::make_shared<torch::nn::SequentialImpl>();
      net->push_back("fc", torch::nn::Linear(6, 4));
      net->push_back("bn", torch::nn::BatchNorm1d(4));
      net->push_back("out", torch::nn::Linear(4, 3));
      if (synchronized) convert_sync_batchnorm(*net, context.group());
      DistributedDataParallel replica(net, context);
      torch::optim::SGD optimizer(net->parameters(), 0.1);
      const auto step = [&](int number) {
        optimizer.zero_grad();
        // Rank 1 skips its second batch, while rank 0 may have no more.
        if (context.rank() == 1 && number == 1)
          replica.skip_step();
        else
          net->forward(batch(number, context.rank()).data).square().mean().backward();
        optimizer.step();
      };
      replica.join([&] {
        for (int number = 0; number < 1 + 2 * context.rank(); ++number) step(number);
      });
      EXPECT_TRUE(equal_on_all(context, *net));
      EXPECT_EQ(replica.skipped_steps(), context.world_size() == 2 ? 1 : 0);
    }
  });
}

/// What the non-finite watch saw in the failed backward is forgotten.
TEST_P(SkipStep, IsNotFoundNonFinite) {
  run_ranks(GetParam(), [](Context& context) {
    if (context.world_size() == 1) return;
    Net net;
    Replicated replica(net, context);
    replica.set_non_finite_policy(NonFinitePolicy::kRaise);
    const bool skips = context.rank() == 0;
    try {
      const double scale = skips ? std::numeric_limits<double>::infinity() : 1;
      (replica(data(0, context.rank()), skips ? Fails::kInBackward : Fails::kNowhere) * scale).sum().backward();
    } catch (const BadBatch&) {
      replica.skip_step();
    }
    EXPECT_TRUE(at::isfinite(net->out->weight.grad()).all().item<bool>());
  });
}

/// reduce_gradients() on a rank without gradients: the mean counts that rank with zeros. It was once refused.
TEST_P(SkipStep, ReduceGradientsTakesPartWithoutABackward) {
  run_ranks(GetParam(), [](Context& context) {
    Net net, reference;
    Replicated replica(net, context);
    for (int step = 0; step < 3; ++step) {
      net->zero_grad();
      reference->zero_grad();
      const bool idle = context.world_size() > 1 && context.rank() == step % context.world_size();
      idle ? replica.reduce_gradients() : replica(data(step, context.rank())).square().mean().backward();
      const int without = context.world_size() > 1 ? step % context.world_size() : -1;
      for (const int rank : all_but(context.world_size(), without))
        (reference(data(step, rank)).square().mean() / context.world_size()).backward();
      EXPECT_TRUE(at::allclose(net->fc1->weight.grad(), reference->fc1->weight.grad(), 1e-12, 1e-14));
      EXPECT_FALSE(net->spare->weight.grad().defined());
    }
    net->zero_grad();
    replica.reduce_gradients();  // no rank has any
    EXPECT_FALSE(net->fc1->weight.grad().defined());
  });
}

}  // namespace
}  // namespace lockstep::skip_step_test
