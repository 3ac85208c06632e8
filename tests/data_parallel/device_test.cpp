// Collectives and training must not depend on where tensors lie: on the CPU, on a fake device and, if there are GPUs,
// on CUDA.

#include <cmath>
#include <limits>

#include <gtest/gtest.h>
#include <lockstep/comm_hook.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/sync_batch_norm.h>

#include "data_parallel/models.h"
#include "reducer/stream_order.h"
#include "support/complaint.h"
#include "support/device_ranks.h"
#include "support/fake_device.h"

namespace lockstep::device_test {
namespace {

using testing::batch;
using testing::formula;
using testing::Where;

class OnDevice : public ::testing::TestWithParam<Where> {
 protected:
  static void on_ranks(const std::function<void(const Group&, at::Device)>& body) {
    testing::run_device_ranks(GetParam(), body);
  }
};
const Where kPlaces[] = {{"cpu", 2},  {"fake", 1},       {"fake", 2},       {"fake", 3},       {"cuda", 1},
                         {"cuda", 2}, {"shared_gpu", 2}, {"shared_gpu", 3}, {"nccl_hosts", 2}, {"nccl_hosts", 3}};
INSTANTIATE_TEST_SUITE_P(Places, OnDevice, ::testing::ValuesIn(kPlaces),
                         [](const auto& instance) { return name_of(instance.param); });

void expect_equal(const at::Tensor& actual, const at::Tensor& expected) {
  EXPECT_TRUE(at::equal(actual.cpu(), expected)) << "got\n" << actual.cpu() << "\nexpected\n" << expected;
}

// set_data(), and so Module::to(), drops autograd's accumulator and the hook on it: training once went on without any
// reduction. LibTorch refuses to move a CPU parameter to the fake device, so there the test changes the dtype.
TEST_P(OnDevice, WhatIsConvertedAfterAttachingIsNoticed) {
  on_ranks([](const Group& group, at::Device device) {
    at::Tensor a = at::ones({3}).to(device.is_cuda() ? at::kCPU : device).requires_grad_();
    DistributedDataParallel replica(NamedTensors{{"a", a}}, group);
    const auto backward = [&] { (a * (group.rank() + 1.0)).sum().backward(); };
    const auto dtype = device.is_cuda() ? at::kFloat : at::kDouble;
    a.set_data(a.detach().to(device, dtype));
    std::string text;
    try {
      backward();
    } catch (const Error& error) {
      text = error.what();
    }
    EXPECT_NE(text.find("parameter a was converted after DistributedDataParallel attached"), std::string::npos) << text;
    replica.refresh();
    a.mutable_grad().reset();
    backward();
    EXPECT_EQ(a.grad().device().type(), device.type());
    expect_equal(a.grad(), at::full({3}, (group.world_size() + 1) / 2.0, dtype));
  });
}

TEST_P(OnDevice, CollectivesMoveAndReduce) {
  on_ranks([](const Group& group, at::Device device) {
    const int n = group.world_size(), me = group.rank();
    const auto row = [&](int rank, at::ScalarType dtype) { return (at::arange(6) + rank).to(dtype); };
    for (const auto dtype :
         {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kComplexFloat}) {
      at::Tensor sum = row(me, dtype).to(device);
      group.all_reduce(sum);
      at::Tensor expected = row(0, dtype);
      for (int rank = 1; rank < n; ++rank) expected += row(rank, dtype);
      expect_equal(sum, expected);
    }
    for (const auto dtype : {at::kShort, at::kBool, at::kComplexDouble}) {  // bytes are moved whatever they mean
      at::Tensor root = row(me, dtype).to(device);
      group.broadcast(root, n - 1);
      expect_equal(root, row(n - 1, dtype));
      std::vector<at::Tensor> all;
      for (int rank = 0; rank < n; ++rank) all.push_back(row(rank, dtype));
      expect_equal(group.all_gather(row(me, dtype).to(device)), at::stack(all));
      const at::Tensor gathered = group.gather(row(me, dtype).to(device), 0);
      if (me == 0) expect_equal(gathered, at::stack(all));
      at::Tensor mine = at::empty({6}, at::device(device).dtype(dtype));
      group.scatter(mine, me == 0 ? at::stack(all).to(device) : at::Tensor(), 0);
      expect_equal(mine, row(me, dtype));
      expect_equal(group.all_to_all(at::stack(all).to(device)), at::stack(std::vector<at::Tensor>(n, row(me, dtype))));
    }
    at::Tensor mean = at::full({3}, me, at::kDouble).to(device), most = mean.clone();
    const Work first = group.all_reduce_async(mean, ReduceOp::kMean);
    const Work second = group.all_reduce_async(most, ReduceOp::kMax);
    second.wait();
    first.wait();
    EXPECT_TRUE(first.is_completed());
    EXPECT_NEAR(mean.sum().item<double>(), 3 * (n - 1) / 2.0, 1e-12);
    EXPECT_EQ(most.sum().item<double>(), 3 * (n - 1));
    at::Tensor any = at::full({2}, me == 0, at::kBool).to(device), every = any.clone();
    group.all_reduce(any, ReduceOp::kOr);
    group.all_reduce(every, ReduceOp::kAnd);
    expect_equal(any, at::ones({2}, at::kBool));
    expect_equal(every, at::full({2}, n == 1, at::kBool));
    at::Tensor to_root = at::full({2}, me + 1, at::kFloat).to(device);
    group.reduce(to_root, 0);
    expect_equal(to_root, at::full({2}, me == 0 ? n * (n + 1) / 2 : me + 1, at::kFloat));
    expect_equal(group.reduce_scatter(at::ones({n, 4}).to(device)), at::full({4}, n, at::kFloat));
    at::Tensor columns = at::full({4, 6}, me, at::kFloat).to(device);
    group.all_reduce(columns.t().narrow(0, 1, 2), ReduceOp::kMax);  // not contiguous
    EXPECT_EQ(columns.sum().item<double>(), 16 * me + 8 * (n - 1));
    at::Tensor letter = at::empty({2}).to(device);
    const Work sent = group.send_async(at::full({2}, me, at::kFloat).to(device), (me + 1) % n, /*tag=*/5);
    group.recv(letter, (me + n - 1) % n, 5);
    sent.wait();
    expect_equal(letter, at::full({2}, (me + n - 1) % n, at::kFloat));
    group.barrier();
    const auto sub = group.subgroup({n - 1});
    if (sub) sub->all_reduce(mean);
  });
}

/// A model without a module: two layers, and a bias that only ranks with an even number use.
struct Parameters {
  explicit Parameters(at::Device device, at::ScalarType dtype = at::kDouble) {
    const std::vector<std::pair<std::string, std::vector<int64_t>>> shapes{
        {"w1", {8, 6}}, {"b1", {8}}, {"even", {8}}, {"nobody", {2}}, {"w2", {3, 8}}, {"b2", {3}}};
    for (const auto& [name, shape] : shapes)
      named.emplace_back(name, formula(shape, static_cast<double>(named.size())).to(dtype).to(device).requires_grad_());
  }
  at::Tensor operator[](size_t i) const { return named[i].second; }
  at::Tensor loss(int step, int rank) const {
    const auto [data, target] = batch(step, rank, named[0].second.scalar_type());
    const at::Device device = named[0].second.device();
    at::Tensor hidden = at::linear(data.to(device), (*this)[0], (*this)[1]);
    if (rank % 2 == 0) hidden = hidden + (*this)[2];
    const at::Tensor output = at::linear(at::tanh(hidden), (*this)[4], (*this)[5]);
    return (output - target.to(device)).square().mean();
  }
  std::vector<at::Tensor> tensors() const {
    std::vector<at::Tensor> all;
    for (const auto& [name, tensor] : named) all.push_back(tensor);
    return all;
  }
  NamedTensors named;
};

const DistributedDataParallelOptions kSmallBuckets{.first_bucket_cap_mb = 1e-4, .bucket_cap_mb = 3e-4};

/// One process with the batches of all ranks: the gradients of these steps, added up over the steps.
at::Tensor loss_of_all(const Parameters& parameters, std::vector<int> steps, int world_size) {
  at::Tensor loss = at::zeros({}, at::kDouble);
  for (const int step : steps)
    for (int rank = 0; rank < world_size; ++rank) loss = loss + parameters.loss(step, rank) / world_size;
  return loss;
}

void expect_close(const Parameters& actual, const Parameters& expected) {
  for (size_t i = 0; i < actual.named.size(); ++i)
    EXPECT_TRUE(at::allclose(actual[i].detach().cpu(), expected[i].detach(), 1e-9, 1e-12)) << actual.named[i].first;
}

TEST_P(OnDevice, TrainsAsOneProcessWould) {
  on_ranks([](const Group& group, at::Device device) {
    const int n = group.world_size(), me = group.rank();
    Parameters parameters(device), alone(at::kCPU);
    DistributedDataParallel replica(parameters.named, group, kSmallBuckets);
    torch::optim::SGD optimizer(parameters.tensors(), 0.5), reference(alone.tensors(), 0.5);
    for (int step = 0; step < 4; ++step) {
      optimizer.zero_grad(step == 2);
      reference.zero_grad();
      if (step == 3) {
        const auto guard = replica.no_sync();
        parameters.loss(10, me).backward();
      }
      parameters.loss(step, me).backward();
      loss_of_all(alone, step == 3 ? std::vector<int>{10, 3} : std::vector<int>{step}, n).backward();
      EXPECT_EQ(parameters[0].grad().device(), device);
      EXPECT_FALSE(parameters[3].grad().defined()) << "no rank used it";
      const double norm = torch::nn::utils::clip_grad_norm_(alone.tensors(), 0.05);
      EXPECT_NEAR(replica.clip_grad_norm(0.05), norm, 1e-9);
      optimizer.step();
      reference.step();
      expect_close(parameters, alone);
    }
    replica.check_divergence();
    if (n == 1) return;
    if (me == 1) parameters[1].data().add_(1);
    EXPECT_THROW(replica.check_divergence(), Error);
    replica.broadcast_parameters(0);
    replica.check_divergence();
    expect_close(parameters, alone);
    if (me == 1) parameters[1].data().add_(n);
    replica.average_parameters(1);
    EXPECT_NEAR((parameters[1].detach().cpu() - alone[1].detach()).min().item<double>(), 1, 1e-9);
  });
}

/// A layer that only even ranks reach, one that nobody reaches, and a buffer that follows rank 0.
struct PartlyUsed : torch::nn::Module {
  explicit PartlyUsed(at::Device device) {
    weight = register_parameter("weight", formula({6, 8}, 1).to(device));
    even = register_parameter("even", formula({6, 8}, 2).to(device));
    nobody = register_parameter("nobody", formula({3}, 3).to(device));
    seen = register_buffer("seen", at::zeros({6}, at::kDouble).to(device));
  }
  at::Tensor forward(const at::Tensor& input, bool is_even) {
    const at::Tensor hidden = is_even ? at::tanh(input.matmul(weight)).matmul(even.t()) : input.matmul(weight);
    seen.add_(1);
    return hidden.square().mean();
  }
  at::Tensor weight, even, nobody, seen;
};

TEST_P(OnDevice, ABackwardDoesNotWaitForTheDevice) {
  if (GetParam().device != "fake") GTEST_SKIP() << "SKIPPED BECAUSE the fake device alone counts what waits for it";
  on_ranks([](const Group& group, at::Device device) {
    const bool is_even = group.rank() % 2 == 0;
    const auto model = std::make_shared<PartlyUsed>(device);
    DistributedDataParallel replica(model, group, kSmallBuckets);
    torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    const at::Tensor input = formula({5, 6}, group.rank()).to(device);
    testing::take_host_waits();
    for (int step = 0; step < 3; ++step) {
      optimizer.zero_grad();
      model->forward(input, is_even).backward();
      optimizer.step();
      EXPECT_EQ(testing::take_host_waits(), 0) << "in step " << step;
    }
    EXPECT_FALSE(model->nobody.grad().defined());
    replica.check_divergence();
    // A count of the times must not be changed by what it counts.
    replica.set_rank_comparison(true);
    testing::take_host_waits();
    model->forward(input, is_even).backward();
    EXPECT_GE(testing::take_host_waits(), group.world_size() > 1 ? 1 : 0) << "times are of results";
  });
}

TEST_P(OnDevice, JoinsUnevenInputsAndFindsWhatIsNotFinite) {
  on_ranks([](const Group& group, at::Device device) {
    const int n = group.world_size(), me = group.rank();
    Parameters parameters(device);
    DistributedDataParallel replica(parameters.named, group, kSmallBuckets);
    torch::optim::SGD optimizer(parameters.tensors(), 0.1);
    replica.join(
        [&] {
          for (int step = 0; step <= me; ++step) {
            parameters.loss(step, me).backward();
            optimizer.step();
            optimizer.zero_grad();
          }
        },
        {.shadow = [&] { optimizer.step(), optimizer.zero_grad(); }});
    replica.check_divergence();
    replica.set_non_finite_policy(NonFinitePolicy::kSkip);
    const double infinity = std::numeric_limits<double>::infinity();
    (parameters.loss(0, me) * (me == n - 1 ? infinity : 1)).backward();
    EXPECT_EQ(replica.skipped_steps(), 1);
    for (const at::Tensor& tensor : parameters.tensors()) EXPECT_FALSE(tensor.grad().defined());
    replica.set_non_finite_policy(NonFinitePolicy::kIgnore);
    GradScaler scaler(group, {.init_scale = 8});
    Parameters before(at::kCPU);
    for (size_t i = 0; i < before.named.size(); ++i) before[i].data().copy_(parameters[i].detach());
    scaler.scale(parameters.loss(1, me) * (me == n - 1 ? infinity : 1)).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    expect_close(parameters, before);
    if (n == 1) return;
    // A gradient that cannot be reduced on one rank is an error on all ranks.
    EXPECT_THROW(parameters.loss(2, me).backward({}, std::nullopt, /*create_graph=*/me == 1), Error);
  });
}

TEST_P(OnDevice, CommHooks) {
  on_ranks([](const Group& group, at::Device device) {
    const int n = group.world_size(), me = group.rank();
    for (const auto& hook : {fp16_compress_hook(), bf16_compress_hook(), power_sgd_hook({.start_iter = 1}),
                             top_k_hook({.density = 1}), post_local_sgd_hook({.start_iter = 100})}) {
      Parameters parameters(device, at::kFloat), alone(at::kCPU, at::kFloat);
      DistributedDataParallel replica(parameters.named, group, kSmallBuckets);
      replica.register_comm_hook(hook);
      for (int step = 0; step < 2; ++step) parameters.loss(0, me).backward();
      loss_of_all(alone, {0, 0}, n).backward();
      replica.check_divergence();
      for (const size_t i : {1, 5})
        EXPECT_TRUE(at::allclose(parameters[i].grad().cpu(), alone[i].grad(), 2e-2, 2e-3)) << parameters.named[i].first;
    }
  });
}

TEST_P(OnDevice, SynchronisedBatchNorm) {
  if (GetParam().device == "fake") GTEST_SKIP() << "SKIPPED BECAUSE batch norm knows the CPU and CUDA alone";
  on_ranks([](const Group& group, at::Device device) {
    const int n = group.world_size(), me = group.rank();
    SyncBatchNorm norm(torch::nn::BatchNormOptions(6), group);
    torch::nn::BatchNorm1d alone(6);
    norm->to(device);
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < n; ++rank) all.push_back(batch(0, rank).data);
    const at::Tensor output = norm(all[static_cast<size_t>(me)].to(device));
    const at::Tensor expected = alone(at::cat(all));
    EXPECT_TRUE(at::allclose(output.detach().cpu(), expected.detach().narrow(0, 4 * me, 4), 1e-4, 1e-5));
    EXPECT_TRUE(at::allclose(norm->running_var.cpu(), alone->running_var, 1e-4, 1e-5));
    output.square().sum().backward();
    expected.square().sum().backward();
    at::Tensor gradient = norm->weight.grad().clone();
    group.all_reduce(gradient);
    EXPECT_TRUE(at::allclose(gradient.cpu(), alone->weight.grad(), 1e-4, 1e-4));
  });
}

TEST(StreamOrder, WhatIsLaunchedComesAfterAllThatFilledTheBucket) {
  StreamOrder order;
  const auto fill_on = [&](int stream) {
    testing::set_fake_stream(stream);
    order.note(testing::fake_device());
  };
  for (const int stream : {3, 5, 3, 7}) fill_on(stream);
  testing::take_fake_waits();
  testing::set_fake_stream(5);  // the stream that launches: work on it comes first anyway
  order.follow();
  EXPECT_EQ(testing::take_fake_waits(), (std::vector<std::pair<int, int>>{{3, 5}, {7, 5}}));
  order.follow();
  EXPECT_TRUE(testing::take_fake_waits().empty());
  fill_on(3);
  order.forget();
  testing::set_fake_stream(0);
  order.follow();
  EXPECT_TRUE(testing::take_fake_waits().empty());
}

}  // namespace
}  // namespace lockstep::device_test
