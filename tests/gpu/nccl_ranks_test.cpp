// NCCL with several ranks, as far as one GPU shows it: each rank pretends to be a machine of its own, so that NCCL
// connects them by sockets. What the engine promises does not depend on the way; speed does, and is not shown here.

#include <unistd.h>

#include <optional>
#include <thread>

#include <ATen/cuda/CUDAContext.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDAGuard.h>
#include <lockstep/distributed_data_parallel.h>

#include "checkpoint/failure.h"
#include "collectives/work.h"
#include "gpu/on_gpu.h"

namespace lockstep {
namespace {

using testing::failure;
using testing::kGpu;

/// Ranks that NCCL has connected.
void run_nccl_ranks(int count, const std::function<void(const Group&)>& body) {
  testing::run_device_ranks({"nccl_hosts", count}, [&](const Group& group, at::Device) {
    at::Tensor one = at::ones({1}, kGpu);
    group.all_reduce(one);
    ASSERT_EQ(one.item<float>(), static_cast<float>(group.world_size()));
    ASSERT_EQ(state_of(group).device_backend->getBackendName(), "nccl");
    body(group);
  });
}

/// Nothing that was queued on the GPU waits for another rank any more.
void expect_gpu_is_free() {
  const auto start = Clock::now();
  at::cuda::getCurrentCUDAStream().synchronize();
  c10::cuda::device_synchronize();
  EXPECT_EQ(at::ones({3}, kGpu).sum().item<double>(), 3);
  testing::expect_told_in_time(start, "the GPU");
}

class NcclRanks : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Counts, NcclRanks, ::testing::Values(2, 3));

TEST_P(NcclRanks, AddWhatWasQueuedBeforeTheOperation) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    const int n = group.world_size();
    for (const bool own_stream : {false, true}) {
      std::optional<c10::cuda::CUDAStreamGuard> guard;
      if (own_stream) guard.emplace(at::cuda::getStreamFromPool());
      at::Tensor tensor = testing::slow_ones() * (group.rank() + 1);
      const Work work = group.all_reduce_async(tensor);
      work.wait();
      EXPECT_TRUE(work.is_completed());
      EXPECT_NEAR((tensor * 2).mean().item<double>(), n * (n + 1), 1e-3);
    }
  });
}

TEST_P(NcclRanks, KeepTheMemoryOfWorksThatNobodyWaitsFor) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    std::vector<at::Tensor> kept;
    for (int i = 0; i < 20; ++i) {
      at::Tensor tensor = at::full({1 << 18}, 1.0 * i, kGpu);
      (void)group.all_reduce_async(tensor);
      if (i % 5 == 0) kept.push_back(tensor);
      const at::Tensor other = at::full({1 << 18}, -1.0, kGpu);  // in the memory that went, if it went
      EXPECT_EQ(other.sum().item<double>(), -(1 << 18));
    }
    for (size_t i = 0; i < kept.size(); ++i)
      EXPECT_EQ(kept[i][77].item<double>(), 5.0 * static_cast<double>(i) * group.world_size());
  });
}

TEST_P(NcclRanks, AreToldOfCallsThatDiffer) {
  const int count = GetParam();
  using Call = std::function<void(const Group&)>;
  const Call usual = [](const Group& group) { group.all_reduce(at::ones({1000}, kGpu)); };
  const std::vector<std::pair<std::string, Call>> others{
      {"another size", [](const Group& group) { group.all_reduce(at::ones({999}, kGpu)); }},
      {"another operation", [](const Group& group) { group.broadcast(at::ones({1000}, kGpu), 0); }},
      {"a tensor on the CPU", [](const Group& group) { group.all_reduce(at::ones({1000})); }},
      {"a larger size", [](const Group& group) { group.all_reduce(at::ones({10'000'000}, kGpu)); }}};
  for (const auto& [what, other] : others) {
    SCOPED_TRACE(what);
    run_nccl_ranks(count, [&other = other, &usual](const Group& group) {
      const std::string said = failure([&] { (group.rank() == 1 ? other : usual)(group); });
      EXPECT_NE(said.find("ranks disagree"), std::string::npos) << said;
      expect_gpu_is_free();
      EXPECT_NE(failure([&] { group.all_reduce(at::ones({2}, kGpu)); }), "");
    });
  }
}

TEST_P(NcclRanks, AreToldThatOneHasEnded) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    if (group.rank() == 1) ::_exit(0);
    const std::string said = failure([&] { group.all_reduce(at::ones({1000}, kGpu)); });
    EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
    expect_gpu_is_free();
  });
}

TEST_P(NcclRanks, AreToldThatOneHasLeft) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    if (group.rank() == 1) return;
    const std::string said = failure([&] { group.all_reduce(at::ones({1000}, kGpu)); });
    EXPECT_NE(said.find("rank 1"), std::string::npos) << said;
    expect_gpu_is_free();
  });
}

TEST_P(NcclRanks, AreToldThatOneHasEndedInTheMiddleOfAnOperation) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    at::Tensor large = at::ones({200'000'000}, kGpu);
    const Work work = group.all_reduce_async(large);
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ::_exit(0);
    }
    EXPECT_NE(failure([&] { work.wait(); }), "");
    expect_gpu_is_free();
  });
}

TEST_P(NcclRanks, AreToldThatOneHasEndedWhileTheHostIsAhead) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    at::Tensor large = at::ones({200'000'000}, kGpu);
    order_after(group.all_reduce_async(large));
    if (group.rank() == 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      ::_exit(0);
    }
    EXPECT_NE(failure([&] { group.barrier(); }), "");
    expect_gpu_is_free();
  });
}

TEST_P(NcclRanks, GoOnWhileTheGpuWorks) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    const int n = group.world_size();
    const at::Tensor weight = at::zeros({1000}, kGpu).requires_grad_(), unused = at::zeros({10}, kGpu).requires_grad_();
    DistributedDataParallel replica(NamedTensors{{"weight", weight}, {"unused", unused}}, group);
    const auto backward = [&](const at::Tensor& factor) { (weight * factor * (group.rank() + 1)).sum().backward(); };
    backward(at::ones({1000}, kGpu));
    for (int step = 1; step <= 3; ++step) {
      weight.mutable_grad().zero_();
      c10::cuda::device_synchronize();
      group.barrier();
      backward(testing::slow_ones().view(-1).narrow(0, 0, 1000) * step);
      EXPECT_FALSE(at::cuda::getCurrentCUDAStream().query()) << "the host has waited for the GPU";
      const at::Tensor twice = weight.grad() * 2;
      EXPECT_NEAR(twice.mean().item<double>(), step * (n + 1), 1e-2);
    }
    EXPECT_FALSE(unused.grad().defined());
  });
}

TEST_P(NcclRanks, HaveSubgroups) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    const Group part = group.split(group.rank() == 2);
    at::Tensor sum = at::full({5}, group.rank() + 1.0, kGpu);
    part.all_reduce(sum);
    EXPECT_EQ(sum[4].item<double>(), 3) << "ranks 0 and 1, or rank 2 alone";
    group.all_reduce(sum);
    EXPECT_EQ(sum[4].item<double>(), 3.0 * group.world_size());
  });
}

TEST_P(NcclRanks, ReplayCapturedCollectives) {
  run_nccl_ranks(GetParam(), [](const Group& group) {
    const c10::cuda::CUDAStreamGuard guard(at::cuda::getStreamFromPool());
    at::Tensor in = at::zeros({1000}, kGpu), sum = at::empty({1000}, kGpu);
    const auto work = [&] {
      sum.copy_(in * 2);
      group.all_reduce(sum);
      sum.add_(1);
    };
    work();
    at::cuda::CUDAGraph graph;
    at::cuda::getCurrentCUDAStream().synchronize();
    graph.capture_begin();
    work();
    graph.capture_end();
    const int n = group.world_size();
    for (int i = 1; i <= 20; ++i) {
      in.fill_(i * (group.rank() + 1));
      graph.replay();
      EXPECT_EQ(sum[i].item<double>(), i * n * (n + 1) + 1);
    }
  });
}

}  // namespace
}  // namespace lockstep
