#include <gtest/gtest.h>

#include <torch/torch.h>

#include <lockstep/checkpoint.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/sync_batch_norm.h>

#include "checkpoint/failure.h"
#include "data_parallel/models.h"
#include "support/ranks.h"

// Training with synchronised batch norm, compared with one process that has the whole batch.

namespace lockstep::sync_batch_norm_training_test {
namespace {

using namespace testing;  // NOLINT

/// Holds its layers by type, as users do; they have different widths.
struct Net : torch::nn::Module {
  at::Tensor forward(const at::Tensor& x) {
    return out(torch::relu(bn2(fc2(torch::relu(bn1(fc1(x)))).unsqueeze(2)).flatten(1)));
  }
  at::Tensor operator()(const at::Tensor& x) { return forward(x); }
  torch::nn::Linear fc1{register_module("fc1", torch::nn::Linear(6, 8))};
  torch::nn::BatchNorm1d bn1{register_module("bn1", torch::nn::BatchNorm1d(8))};
  torch::nn::Linear fc2{register_module("fc2", torch::nn::Linear(8, 5))};
  torch::nn::BatchNorm1d bn2{register_module("bn2", torch::nn::BatchNorm1d(5))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(5, 3))};
};

std::shared_ptr<Net> make_net(at::ScalarType dtype) {
  auto net = std::make_shared<Net>();
  net->to(dtype);
  fill(*net);
  return net;
}

torch::optim::SGD optimizer_of(torch::nn::Module& module) {
  return torch::optim::SGD(module.parameters(), torch::optim::SGDOptions(0.05).momentum(0.9));
}

/// The number of a rank's samples in a step; 0 is an empty batch.
int64_t samples_of(int step, int rank) { return (step + 2 * rank) % 3 == 0 ? 0 : 2 + rank + step % 3; }

/// The samples of `ranks`.
Sample whole_batch(int step, const std::vector<int>& ranks, at::ScalarType dtype) {
  std::vector<at::Tensor> data, target;
  for (const int rank : ranks) {
    const Sample part = batch(step, rank, dtype, samples_of(step, rank));
    data.push_back(part.data);
    target.push_back(part.target);
  }
  return {at::cat(data), at::cat(target)};
}

template <typename Model>
at::Tensor loss_sum(Model&& model, const Sample& sample) {
  return (model(sample.data) - sample.target).square().sum() / 10;
}

void expect_equal(const StateDict& actual, const StateDict& expected, double tolerance) {
  ASSERT_EQ(actual.keys(), expected.keys());
  for (const auto& item : expected)
    EXPECT_LE((actual[item.key()] - item.value()).abs().max().item<double>(), tolerance) << item.key();
}

struct Training : ::testing::TestWithParam<Engine> {};
INSTANTIATE_TEST_SUITE_P(Engines, Training,
                         ::testing::Values(Engine{1, ""}, Engine{2, "shm"}, Engine{3, "shm"}, Engine{2, "gloo"},
                                           Engine{3, "gloo"}),
                         [](const auto& instance) { return name_of(instance.param); });

std::vector<int> ranks_below(int count) {
  std::vector<int> ranks;
  for (int rank = 0; rank < count; ++rank) ranks.push_back(rank);
  return ranks;
}

TEST_P(Training, UnevenAndEmptyBatchesTrainAsOneProcessWould) {
  run_ranks(GetParam(), [](Context& context) {
    for (const auto dtype : {at::kDouble, at::kFloat}) {
      auto net = make_net(dtype), alone = make_net(dtype);
      EXPECT_EQ(convert_sync_batchnorm(*net, context.group()), 2);
      // Small buckets: reductions of gradients start between the batch norms of backward.
      DistributedDataParallel replica(
          net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5, .reduction = GradientReduction::kSum});
      auto optimizer = optimizer_of(*net), expected = optimizer_of(*alone);
      for (int step = 0; step < 12; ++step) {
        const Sample all = whole_batch(step, ranks_below(context.world_size()), dtype);
        if (all.data.size(0) < 2) continue;
        optimizer.zero_grad();
        loss_sum(replica, batch(step, context.rank(), dtype, samples_of(step, context.rank()))).backward();
        optimizer.step();
        expected.zero_grad();
        loss_sum(*alone, all).backward();
        expected.step();
      }
      expect_equal(state_dict(*net), state_dict(*alone), dtype == at::kDouble ? 1e-12 : 5e-6);
    }
  });
}

/// Within join(), the others' layers need an answer from a rank that has run out and does not know what they run.
TEST_P(Training, WithinJoinRanksThatHaveRunOutTakePart) {
  run_ranks(GetParam(), [](Context& context) {
    const int world_size = context.world_size();
    const auto inputs_of = [&](int rank) { return rank == 1 ? 0 : 3 + 4 * rank; };  // 3, 0, 11
    auto net = make_net(at::kDouble), alone = make_net(at::kDouble);
    convert_sync_batchnorm(*net, context.group());
    DistributedDataParallel replica(
        net, context, {.first_bucket_cap_mb = 1e-5, .bucket_cap_mb = 1e-5, .reduction = GradientReduction::kSum});
    auto optimizer = optimizer_of(*net), expected = optimizer_of(*alone);
    const auto part = [&](int step, int rank) { return batch(step, rank, at::kDouble, 2 + (step + rank) % 3); };
    const auto step_all = [&] { optimizer.step(), optimizer.zero_grad(); };
    replica.join(
        [&] {
          for (int step = 0; step < inputs_of(context.rank()); ++step) {
            {
              // Two backward passes per step, and one more forward without a backward.
              const auto guard = replica.no_sync();
              loss_sum(replica, part(step + 100, context.rank())).backward();
            }
            replica(part(step + 200, context.rank()).data);
            loss_sum(replica, part(step, context.rank())).backward();
            step_all();
          }
        },
        {.shadow = step_all});
    int steps = 0;
    for (int rank = 0; rank < world_size; ++rank) steps = std::max(steps, inputs_of(rank));
    for (int step = 0; step < steps; ++step) {
      const auto all = [&](int offset) {
        Sample whole;
        for (int rank = 0; rank < world_size; ++rank) {
          if (step >= inputs_of(rank)) continue;
          const Sample one = part(step + offset, rank);
          whole.data = whole.data.defined() ? at::cat({whole.data, one.data}) : one.data;
          whole.target = whole.target.defined() ? at::cat({whole.target, one.target}) : one.target;
        }
        return whole;
      };
      loss_sum(*alone, all(100)).backward();
      alone->forward(all(200).data);
      loss_sum(*alone, all(0)).backward();
      expected.step(), expected.zero_grad();
    }
    expect_equal(state_dict(*net), state_dict(*alone), 1e-12);
    // After join() all ranks have inputs again.
    loss_sum(replica, part(50, context.rank())).backward();
  });
}

TEST(TrainingErrors, WeightedMeansAreRefusedAndAnotherGroupWithinJoin) {
  run_ranks(2, [](Context& context) {
    auto net = make_net(at::kFloat);
    convert_sync_batchnorm(*net, context.group());
    EXPECT_THROW(DistributedDataParallel(net, context, {.reduction = GradientReduction::kWeightedMean}), c10::Error);
    auto other = make_net(at::kFloat);
    const Group twin = *context.group().subgroup({0, 1});
    convert_sync_batchnorm(*other, twin);
    DistributedDataParallel replica(net, context);
    EXPECT_THROW(replica.join([] {}), c10::Error);
  });
}

TEST(TrainingErrors, WithinJoinALayerBesideAReductionIsNamed) {
  run_ranks(2, [](Context& context) {
    auto net = make_net(at::kFloat);
    convert_sync_batchnorm(*net, context.group());
    DistributedDataParallel replica(net, context);
    const std::string text = failure([&] {
      replica.join([&] {
        const at::Tensor loss = loss_sum(replica, batch(0, context.rank()));
        if (context.rank() == 0) return replica.reduce_gradients();
        loss.backward();
      });
    });
    EXPECT_NE(text.find("rank 1 came to a synchronised batch norm while rank 0 reduced gradients"), std::string::npos)
        << text;
  });
}

}  // namespace
}  // namespace lockstep::sync_batch_norm_training_test
