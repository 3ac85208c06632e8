// The training kit on a GPU: mixed precision, loaders that pin memory, checkpoints, memory that comes back.

#include <limits>

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <lockstep/autocast.h>
#include <lockstep/checkpoint.h>
#include <lockstep/checkpointer.h>
#include <lockstep/data_loader.h>
#include <lockstep/distributed_data_parallel.h>
#include <lockstep/ema.h>
#include <lockstep/fully_sharded_data_parallel.h>
#include <lockstep/grad_scaler.h>
#include <lockstep/metrics.h>

#include "data/numbers.h"
#include "data_parallel/models.h"
#include "fully_sharded/small_gpt.h"
#include "gpu/on_gpu.h"
#include "support/complaint.h"
#include "support/temporary_folder.h"

namespace lockstep {
namespace {

using testing::kGpu;
using testing::run_gpu_ranks;

std::shared_ptr<testing::Plain> make_model() {
  auto model = std::make_shared<testing::Plain>();
  testing::fill(*model);
  model->to(kGpu);
  return model;
}

at::Tensor loss_of(testing::Plain& model, int step) {
  const auto [data, target] = testing::batch(step, 0, at::kFloat, 32);
  return torch::mse_loss(model.forward(data.to(kGpu), step, 0), target.to(kGpu));
}

TEST(OnGpu, MixedPrecisionStaysNearFullPrecision) {
  run_gpu_ranks(1, [](Context& context) {
    for (const auto dtype : {at::kHalf, at::kBFloat16}) {
      SCOPED_TRACE(toString(dtype));
      const auto full = make_model(), mixed = make_model();
      DistributedDataParallel reference(full, context.group()), replica(mixed, context.group());
      torch::optim::SGD one(full->parameters(), 0.1), other(mixed->parameters(), 0.1);
      GradScaler scaler(context.group(), {.init_scale = 1024});
      for (int step = 0; step < 20; ++step) {
        one.zero_grad();
        loss_of(*full, step).backward();
        one.step();
        other.zero_grad();
        at::Tensor loss;
        {
          const auto guard = autocast({.device = at::kCUDA, .dtype = dtype});
          loss = loss_of(*mixed, step);
        }
        scaler.scale(loss).backward();
        EXPECT_TRUE(scaler.step(other));
        scaler.update();
      }
      bool differs = false;
      const auto expected = full->named_parameters();
      for (const auto& item : mixed->named_parameters()) {
        EXPECT_EQ(item.value().scalar_type(), at::kFloat);
        EXPECT_TRUE(at::allclose(item.value(), expected[item.key()], 5e-2, 5e-3)) << item.key();
        differs = differs || !at::equal(item.value(), expected[item.key()]);
      }
      EXPECT_TRUE(differs) << "it ran in full precision";
    }
  });
}

TEST(OnGpu, AnOverflowSkipsTheStepAndHalvesTheScale) {
  run_gpu_ranks(1, [](Context& context) {
    const auto model = make_model();
    DistributedDataParallel replica(model, context.group());
    torch::optim::SGD optimizer(model->parameters(), 0.1);
    GradScaler scaler(context.group(), {.init_scale = 1024});
    const at::Tensor before = model->fc1->weight.detach().clone();
    scaler.scale(loss_of(*model, 0) * std::numeric_limits<float>::infinity()).backward();
    EXPECT_FALSE(scaler.step(optimizer));
    scaler.update();
    EXPECT_EQ(scaler.get_scale(), 512);
    EXPECT_TRUE(at::equal(model->fc1->weight, before));
  });
}

TEST(OnGpu, LoadersPinMemoryAndCopy) {
  run_gpu_ranks(1, [](Context& context) {
    constexpr int64_t kSamples = 1000;
    const auto seen_by = [&](DataLoaderOptions options) {
      options.batch_size = 16;
      options.shuffle = true;
      options.workers = 2;
      DataLoader loader(testing::Numbers(kSamples), context, options);
      std::vector<at::Tensor> seen;
      for (const auto& batch : loader) {
        if (options.device)
          EXPECT_EQ(batch.data.device(), *options.device);
        else
          EXPECT_EQ(batch.data.is_pinned(), options.pin_memory);
        // Queued behind the copy, while the loader fills other memory.
        seen.push_back(batch.data.to(kGpu) * 2);
      }
      return at::cat(seen).cpu();
    };
    const at::Tensor plain = seen_by({});
    EXPECT_EQ(plain.size(0), kSamples);
    EXPECT_TRUE(at::equal(seen_by({.pin_memory = true}), plain));
    EXPECT_TRUE(at::equal(seen_by({.pin_memory = true, .device = kGpu}), plain));
    EXPECT_TRUE(at::equal(seen_by({.device = kGpu}), plain));
  });
}

TEST(OnGpu, CheckpointsResumeBitForBit) {
  run_gpu_ranks(1, [](Context& context) {
    const TemporaryFolder folder;
    const auto run = [&](int steps, bool resumed) {
      const auto model = make_model();
      DistributedDataParallel replica(model, context.group());
      torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(1e-2));
      Checkpointer checkpointer((folder.path() / "checkpoints").string(), context.group());
      checkpointer.add("model", replica).add("optimizer", optimizer);
      if (resumed) {
        EXPECT_TRUE(checkpointer.resume());
      }
      EXPECT_EQ(checkpointer.resumed_step(), resumed ? 5 : 0);
      for (int step = resumed ? 5 : 0; step < steps; ++step) {
        optimizer.zero_grad();
        loss_of(*model, step).backward();
        optimizer.step();
      }
      if (steps == 5) checkpointer.save(5);
      checkpointer.finish();
      return at::cat({model->fc1->weight.flatten(), model->fc2->weight.flatten()}).detach();
    };
    const at::Tensor whole = run(10, false);
    (void)run(5, false);
    const at::Tensor resumed = run(10, true);
    EXPECT_EQ(resumed.device(), kGpu);
    EXPECT_TRUE(at::equal(resumed, whole));
  });
}

TEST(OnGpu, AFileOfGpuTensorsLoadsOnTheCpuAndOnTheGpu) {
  run_gpu_ranks(1, [](Context&) {
    const TemporaryFolder folder;
    const std::string path = (folder.path() / "model.pt").string();
    const auto model = make_model();
    save(state_dict(*model), path);
    const auto on_cpu = std::make_shared<testing::Plain>(), on_gpu = std::make_shared<testing::Plain>();
    on_gpu->to(kGpu);
    load_state_dict(*on_cpu, load(path).tensors);
    load_state_dict(*on_gpu, load(path).tensors);
    EXPECT_TRUE(at::equal(on_cpu->fc1->weight, model->fc1->weight.cpu()));
    EXPECT_TRUE(at::equal(on_gpu->fc1->weight, model->fc1->weight));
  });
}

TEST(OnGpu, AveragesAndMetricsStayOnTheGpu) {
  run_gpu_ranks(1, [](Context& context) {
    const auto model = make_model(), on_cpu = std::make_shared<testing::Plain>();
    testing::fill(*on_cpu);
    Ema ema(*model, {.decays = {0.5}}), expected(*on_cpu, {.decays = {0.5}});
    for (int step = 0; step < 5; ++step) {
      const torch::NoGradGuard no_grad;
      for (at::Tensor parameter : model->parameters()) parameter.mul_(0.9);
      for (at::Tensor parameter : on_cpu->parameters()) parameter.mul_(0.9);
      ema.update();
      expected.update();
    }
    const StateDict averages = ema.averaged_state(), wanted = expected.averaged_state();
    for (const auto& item : averages) {
      EXPECT_EQ(item.value().device(), kGpu);
      EXPECT_TRUE(at::allclose(item.value().cpu(), wanted[item.key()], 1e-6, 1e-7)) << item.key();
    }
    Accuracy accuracy;
    accuracy.update(at::eye(4).to(kGpu), at::tensor({0, 1, 3, 3}, at::kLong).to(kGpu));
    EXPECT_EQ(accuracy.value(), 0.75);
    testing::SmallGpt gpt(1);
    gpt->to(kGpu);
    EXPECT_NE(testing::complaint([&] { FullyShardedDataParallel(gpt, context.group()); }).find("is not on the CPU"),
              std::string::npos);
  });
}

TEST(OnGpu, MemoryComesBackWithTheReplica) {
  run_gpu_ranks(1, [](Context& context) {
    const auto in_use = [] {
      return c10::cuda::CUDACachingAllocator::getDeviceStats(0).allocated_bytes.front().current;
    };
    (void)at::ones({1}, kGpu);
    int64_t before = 0;
    for (int round = 0; round < 4; ++round) {
      {
        const auto model = make_model();
        DistributedDataParallel replica(model, context.group());
        torch::optim::SGD optimizer(model->parameters(), 0.1);
        for (int step = 0; step < 3; ++step) {
          optimizer.zero_grad();
          loss_of(*model, step).backward();
          optimizer.step();
        }
      }
      if (round == 1) before = in_use();  // libraries keep their workspaces from the first use on
    }
    EXPECT_EQ(in_use(), before);
  });
}

}  // namespace
}  // namespace lockstep
