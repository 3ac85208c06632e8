#pragma once

#include <filesystem>
#include <functional>
#include <ostream>
#include <string>

#include <ATen/detail/CUDAHooksInterface.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "collectives/group_state.h"
#include "gpu/pretend.h"
#include "support/fake_device.h"
#include "support/ranks.h"
#include "support/staged_backend.h"

// Ranks with a device each: the CPU, the fake device and, where there are GPUs, CUDA; or ranks that share one GPU.

namespace lockstep::testing {

struct Where {
  /// "cpu", "fake", "cuda": a GPU for each rank, "shared_gpu": one for all ranks, without NCCL, "nccl_hosts": one for
  /// all ranks, which NCCL takes for machines with a GPU each, so that it connects them by sockets
  std::string device;
  int world_size;
  std::string backend = "";  ///< of tensors on the CPU, which does the fake device's work; "": as it is by itself
};
inline std::string name_of(const Where& where) {
  return where.device + "_" + std::to_string(where.world_size) + (where.backend.empty() ? "" : "_") + where.backend;
}
inline void PrintTo(const Where& where, std::ostream* out) { *out << name_of(where); }

/// Without initialising CUDA, because processes forked later could not use it then.
inline int count_gpus() {
  if (!at::detail::getCUDAHooks().hasCUDART()) return 0;
  int gpus = 0;
  while (std::filesystem::exists("/dev/nvidia" + std::to_string(gpus))) ++gpus;
  return gpus;
}

/// The same ranks with another engine for devices, over copies of theirs for the CPU.
inline Group over_cpu_engine(const Group& group,
                             c10::intrusive_ptr<c10d::Backend> (*wrap)(c10::intrusive_ptr<c10d::Backend>)) {
  const Group::State& state = state_of(group);
  const auto factory = [wrap, cpu = state.factories.cpu](c10::DeviceType, const auto& store, int rank, int size) {
    return wrap(cpu(store, rank, size));
  };
  c10::intrusive_ptr<c10d::Store> store;
  if (state.store) store = c10::make_intrusive<c10d::PrefixStore>("fake", state.store);
  return make_group(store, state.rank, state.world_size, {state.factories.cpu, factory});
}

/// Skips the test where there are not enough GPUs, and says so.
inline void run_device_ranks(const Where& where, const std::function<void(const Group&, at::Device)>& body) {
  const bool is_one_gpu = where.device == "shared_gpu" || where.device == "nccl_hosts";
  const int gpus = where.device == "cuda" ? where.world_size : is_one_gpu ? 1 : 0;
  if (count_gpus() < gpus)
    GTEST_SKIP() << "SKIPPED BECAUSE " << gpus << " GPUs are needed, there are " << count_gpus()
                 << " for this LibTorch: nothing was tried on CUDA";
  const auto on_rank = [&](Context& context) {
    at::set_num_threads(1);
    if (where.device == "cuda") return body(context.group(), at::Device(at::kCUDA, context.local_rank()));
    if (where.device == "nccl_hosts") {
      pretend_to_be_a_machine(context.rank());
      return body(context.group(), at::Device(at::kCUDA, 0));
    }
    if (where.device == "cpu") return body(context.group(), at::kCPU);
    if (where.device == "shared_gpu")
      return body(over_cpu_engine(context.group(), make_staged_backend), at::Device(at::kCUDA, 0));
    body(over_cpu_engine(context.group(), make_fake_device_backend), fake_device());
  };
  if (where.backend.empty())
    run_ranks(where.world_size, on_rank);
  else
    run_ranks(Engine{where.world_size, where.backend}, on_rank);
}

}  // namespace lockstep::testing
