#include "checkpoint/random_states.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <torch/cuda.h>

// Uses LibTorch's hooks, so that one build serves a LibTorch with CUDA and one without.

namespace lockstep {
namespace {

c10::DeviceIndex cuda_devices() { return static_cast<c10::DeviceIndex>(torch::cuda::device_count()); }

/// A checkpoint must not start CUDA in a process that computes on the CPU of a machine with a GPU.
bool uses_cuda() {
  for (c10::DeviceIndex device = 0; device < cuda_devices(); ++device)
    if (at::globalContext().getAcceleratorHooksInterface(at::kCUDA).hasPrimaryContext(device)) return true;
  return false;
}

at::Generator cuda_generator(c10::DeviceIndex device) {
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
}

}  // namespace

void save_random_states(c10::impl::GenericDict& into) {
  into.insert(kRandom, at::detail::getDefaultCPUGenerator().get_state());
  if (!uses_cuda()) return;
  c10::impl::GenericList states(c10::AnyType::get());
  for (c10::DeviceIndex device = 0; device < cuda_devices(); ++device)
    states.push_back(cuda_generator(device).get_state());
  into.insert(kRandomCuda, states);
}

void restore_random_states(const c10::impl::GenericDict& from) {
  at::Generator generator = at::detail::getDefaultCPUGenerator();
  generator.set_state(from.at(kRandom).toTensor().clone());
  if (!from.contains(kRandomCuda)) return;
  const auto states = from.at(kRandomCuda).toList();
  if (states.size() != static_cast<size_t>(cuda_devices())) {
    TORCH_WARN("the checkpoint has the random states of ", states.size(), " CUDA devices, but this process sees ",
               static_cast<int>(cuda_devices()), "; they are not resumed");
    return;
  }
  for (c10::DeviceIndex device = 0; device < cuda_devices(); ++device)
    cuda_generator(device).set_state(states.get(static_cast<size_t>(device)).toTensor().clone());
}

}  // namespace lockstep
