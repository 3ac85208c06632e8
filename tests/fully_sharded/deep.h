#pragma once

#include <fstream>
#include <string>

#include <lockstep/fully_sharded_data_parallel.h>
#include <torch/torch.h>

// A model whose memory is worth measuring.

namespace lockstep::testing {

/// KiB of memory of this process without files: of its own, and its share of what others map, too.
inline int64_t proportional_kib() {
  std::ifstream file("/proc/self/smaps_rollup");
  int64_t kib = 0;
  for (std::string line; std::getline(file, line);)
    if (line.starts_with("Pss_Anon:") || line.starts_with("Pss_Shmem:")) kib += std::stoll(line.substr(10));
  return kib;
}

struct WideImpl : torch::nn::Module {
  WideImpl() { register_module("fc", fc = torch::nn::Linear(torch::nn::LinearOptions(1024, 1024).bias(false))); }
  at::Tensor forward(const at::Tensor& x) { return torch::tanh(fc(x)); }
  torch::nn::Linear fc{nullptr};
};
TORCH_MODULE(Wide);

struct DeepImpl : torch::nn::Module {
  static constexpr int kUnits = 16;
  DeepImpl() {
    for (int i = 0; i < kUnits; ++i) layers->push_back(ShardedUnit<Wide>());
    register_module("layers", layers);
  }
  at::Tensor forward(const at::Tensor& x) { return layers->forward(x); }
  torch::nn::Sequential layers;
};
TORCH_MODULE(Deep);

/// One unit's weights are 4 MiB.
constexpr int64_t kUnitKib = 4096, kModelKib = DeepImpl::kUnits * kUnitKib;

}  // namespace lockstep::testing
