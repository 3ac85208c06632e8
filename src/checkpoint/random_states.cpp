#include "checkpoint/random_states.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/List.h>
#include <torch/cuda.h>

#include <cstring>

#include "base/error.h"
#include "base/loop_begin.h"

// Uses LibTorch's hooks, so that one build works with LibTorch with and without CUDA.

namespace lockstep {
namespace {

c10::DeviceIndex cuda_devices() { return static_cast<c10::DeviceIndex>(torch::cuda::device_count()); }

/// A checkpoint must not start CUDA in a process that computes on the CPU of a machine with a GPU.
bool uses_cuda() {
  for (c10::DeviceIndex device = 0; device < cuda_devices(); ++device)
    if (at::globalContext().getAcceleratorHooksInterface(at::kCUDA).hasPrimaryContext(device)) return true;
  return false;
}

at::Tensor tensor_of(const std::string& bytes) {
  at::Tensor tensor = at::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
  std::memcpy(tensor.mutable_data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string bytes_of(const at::Tensor& state) {
  const at::Tensor tensor = state.contiguous();
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

at::Generator cuda_generator(c10::DeviceIndex device) {
  return at::globalContext().defaultGenerator(at::Device(at::kCUDA, device));
}

}  // namespace

void save_random_states(c10::impl::GenericDict& into, const VirtualRanks* virtual_ranks) {
  if (virtual_ranks != nullptr) {
    const std::vector<std::string> states = virtual_ranks->generator_states();
    c10::impl::GenericList own(c10::AnyType::get());
    for (size_t i = 1; i < states.size(); ++i) own.push_back(tensor_of(states[i]));
    into.insert(kRandom, tensor_of(states[0]));
    into.insert(kRandomVirtual, own);
  } else {
    into.insert(kRandom, at::detail::getDefaultCPUGenerator().get_state());
  }
  if (!uses_cuda()) return;
  c10::impl::GenericList states(c10::AnyType::get());
  for (c10::DeviceIndex device = 0; device < cuda_devices(); ++device)
    states.push_back(cuda_generator(device).get_state());
  into.insert(kRandomCuda, states);
}

void restore_random_states(const c10::impl::GenericDict& from) {
  when_loop_begins(nullptr);  // this rank's own seed is no longer needed
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

void restore_random_states(const std::vector<c10::impl::GenericDict>& ranks, VirtualRanks& virtual_ranks) {
  std::vector<std::string> all;
  for (const auto& rank : ranks)
    for (const c10::IValue& state : rank.at(kRandomVirtual).toListRef()) all.push_back(bytes_of(state.toTensor()));
  if (all.size() != static_cast<size_t>(virtual_ranks.count()))
    throw Error("the checkpoint has random states of " + std::to_string(all.size()) + " virtual ranks, not of " +
                std::to_string(virtual_ranks.count()));
  std::vector<std::string> states{bytes_of(ranks.front().at(kRandom).toTensor())};
  const LeafRange block = virtual_ranks.block();
  states.insert(states.end(), all.begin() + block.first, all.begin() + block.last);
  virtual_ranks.set_generator_states(states);
}

}  // namespace lockstep
