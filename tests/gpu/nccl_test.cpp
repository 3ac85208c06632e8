// NCCL itself, as far as one GPU shows it.

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDAGuard.h>

#include <lockstep/error.h>

#include "gpu/on_gpu.h"
#include "support/complaint.h"

namespace lockstep {
namespace {

using testing::complaint;
using testing::kGpu;
using testing::nccl_world_of_one;
using testing::run_gpu_ranks;

TEST(Nccl, HasEveryCollectiveForOneRank) {
  run_gpu_ranks(1, [](Context&) {
    const Group group = nccl_world_of_one();
    ASSERT_EQ(state_of(group).device_backend->getBackendName(), "nccl");
    for (const auto dtype : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kInt, at::kLong, at::kByte,
                             at::kComplexFloat, at::kBool}) {
      SCOPED_TRACE(toString(dtype));
      const at::Tensor row = (at::arange(6) % 2).to(dtype).to(kGpu);
      at::Tensor sum = row.clone();
      group.all_reduce(sum);
      EXPECT_TRUE(at::equal(sum, row));
      group.broadcast(sum, 0);
      group.reduce(sum, 0);
      EXPECT_TRUE(at::equal(sum, row));
      EXPECT_TRUE(at::equal(group.all_gather(row), row.unsqueeze(0)));
      EXPECT_TRUE(at::equal(group.gather(row, 0), row.unsqueeze(0)));
      EXPECT_TRUE(at::equal(group.reduce_scatter(row.unsqueeze(0)), row));
      EXPECT_TRUE(at::equal(group.all_to_all(row.unsqueeze(0)), row.unsqueeze(0)));
      at::Tensor mine = at::zeros_like(row);
      group.scatter(mine, row.unsqueeze(0), 0);
      EXPECT_TRUE(at::equal(mine, row));
    }
    at::Tensor mean = at::full({4}, 3.0, kGpu);
    group.all_reduce(mean, ReduceOp::kMean);
    EXPECT_EQ(mean.sum().item<double>(), 12);
    group.barrier();
  });
}

TEST(Nccl, RefusesWhatItCannotReduce) {
  run_gpu_ranks(1, [](Context&) {
    const Group group = nccl_world_of_one();
    const auto said = [&](at::ScalarType dtype, ReduceOp op) {
      return complaint([&] { group.all_reduce(at::ones({2}, kGpu).to(dtype), op); });
    };
    EXPECT_NE(said(at::kShort, ReduceOp::kSum).find("NCCL does not reduce int16"), std::string::npos);
    EXPECT_NE(said(at::kInt, ReduceOp::kAnd).find("NCCL has no kAnd and kOr"), std::string::npos);
    EXPECT_NE(said(at::kComplexFloat, ReduceOp::kMax), "");
    at::Tensor still = at::ones({2}, kGpu);
    group.all_reduce(still);
    EXPECT_EQ(still.sum().item<double>(), 2);
  });
}

TEST(Nccl, AnOperationBeginsAfterTheWorkQueuedBeforeItOnEveryStream) {
  run_gpu_ranks(1, [](Context&) {
    const Group group = nccl_world_of_one();
    (void)testing::slow_ones();
    for (const bool own_stream : {false, true}) {
      std::optional<c10::cuda::CUDAStreamGuard> guard;
      if (own_stream) guard.emplace(at::cuda::getStreamFromPool());
      at::Tensor tensor = testing::slow_ones();
      const Work work = group.all_reduce_async(tensor);
      work.wait();
      EXPECT_TRUE(work.is_completed());
      const at::Tensor after = tensor * 2;
      EXPECT_NEAR(after.mean().item<double>(), 2, 1e-3);
    }
  });
}

TEST(Nccl, AWorkThatNobodyWaitsForKeepsItsMemory) {
  run_gpu_ranks(1, [](Context&) {
    const Group group = nccl_world_of_one();
    for (int i = 0; i < 50; ++i) {
      at::Tensor tensor = at::full({1 << 20}, i, kGpu);
      (void)group.all_reduce_async(tensor);
      const at::Tensor other = at::full({1 << 20}, -1, kGpu);  // in the memory that went, if it went
      if (i % 10 == 0) {
        EXPECT_EQ(other.sum().item<double>(), -(1 << 20));
      }
    }
  });
}

TEST(Nccl, TwoRanksOnOneGpuAreRefusedByName) {
  for (const int ranks : {2, 3})
    run_gpu_ranks(ranks, [](Context& context) {
      std::string said;
      try {
        context.group().all_reduce(at::ones({2}, kGpu));
      } catch (const Error& error) {
        said = error.what();
      }
      EXPECT_EQ(
          said.rfind(
              context.world_size() == 2 ? "ranks 0, 1 use the same GPU (GPU-" : "ranks 0-2 use the same GPU (GPU-", 0),
          0u)
          << said;
      at::Tensor one = at::ones({1});
      context.group().all_reduce(one);  // tensors on the CPU travel on
      EXPECT_EQ(one.item<float>(), context.world_size());
    });
}

}  // namespace
}  // namespace lockstep
