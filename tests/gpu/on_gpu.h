#pragma once

#include <chrono>
#include <functional>

#include <gtest/gtest.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "collectives/group_state.h"
#include "collectives/nccl/nccl_backend.h"
#include "support/device_ranks.h"

namespace lockstep::testing {

/// A world of one whose tensors on a GPU go through NCCL, not through the engine of worlds of one.
inline Group nccl_world_of_one() {
  Group group = make_group({}, 0, 1, {});
  state_of(group).device_backend =
      nccl_engine::make_backend(at::kCUDA, c10::make_intrusive<c10d::HashStore>(), 0, 1, std::chrono::seconds(30));
  return group;
}

inline const at::Device kGpu(at::kCUDA, 0);

/// Work that keeps a GPU busy for tens of milliseconds.
inline at::Tensor slow_ones() {
  at::Tensor matrix = at::full({4096, 4096}, 1.0 / 4096, kGpu);
  for (int i = 0; i < 20; ++i) matrix = at::matmul(matrix, matrix) * 1.0;
  return matrix * 4096;
}

/// Runs `body` on as many ranks, all of which see the same GPUs. Skips the test where there is no GPU.
inline void run_gpu_ranks(int count, const std::function<void(Context&)>& body) {
  if (count_gpus() == 0) GTEST_SKIP() << "SKIPPED BECAUSE there is no GPU for this LibTorch";
  run_ranks(count, body);
}

}  // namespace lockstep::testing
