// Run by `lockstep doctor` as two ranks, for facts that need LibTorch. `doctor_probe [BACKEND]`: rank 0 prints one JSON
// object. With a backend's name, it only reports whether that works.

#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <vector>

#include "../bench/all_reduce/triad.h"
#include "base/environment.h"
#include "result_bits.h"

namespace {

using Json = nlohmann::json;
using Seconds = std::chrono::duration<double>;

constexpr int64_t kSamples = 24, kFeatures = 16;
constexpr size_t kTriadBytes = size_t{32} << 20;
constexpr int64_t kReducedElements = int64_t{16} << 20;

Json about_torch() {
  return {{"version", TORCH_VERSION},
          {"cxx11_abi", _GLIBCXX_USE_CXX11_ABI == 1},
          {"cpu_capability", at::get_cpu_capability()},
          {"threads_alone", at::get_num_threads()},
          {"cuda_devices", torch::cuda::is_available() ? static_cast<int>(torch::cuda::device_count()) : 0}};
}

torch::nn::Sequential make_model() {
  torch::manual_seed(7);
  torch::nn::Sequential model(torch::nn::Linear(kFeatures, 32), torch::nn::Tanh(), torch::nn::Linear(32, 3));
  model->to(torch::kFloat64);
  return model;
}

torch::Tensor loss_of(torch::nn::Sequential& model, const torch::Tensor& inputs, const torch::Tensor& targets) {
  return torch::mse_loss(model->forward(inputs), targets);
}

/// Compares one backward of ranks that share a batch with one process's: the largest difference of a gradient, relative
/// to the largest gradient.
Json check_gradients(const lockstep::Context& context) {
  torch::nn::Sequential whole = make_model(), part = make_model();
  torch::manual_seed(8);
  const auto inputs = torch::randn({kSamples, kFeatures}, torch::kFloat64);
  const auto targets = torch::randn({kSamples, 3}, torch::kFloat64);
  loss_of(whole, inputs, targets).backward();
  const lockstep::DistributedDataParallel attached(part, context);
  const int64_t share = kSamples / context.world_size(), start = context.rank() * share;
  loss_of(part, inputs.narrow(0, start, share), targets.narrow(0, start, share)).backward();
  double difference = 0, largest = 0;
  const auto expected = whole->parameters(), found = part->parameters();
  for (size_t i = 0; i < expected.size(); ++i) {
    difference = std::max(difference, (expected[i].grad() - found[i].grad()).abs().max().item<double>());
    largest = std::max(largest, expected[i].grad().abs().max().item<double>());
  }
  const auto worst = torch::tensor({difference / largest}, torch::kFloat64);
  context.group().all_reduce(worst, lockstep::ReduceOp::kMax);
  return {{"relative_difference", worst.item<double>()}, {"parameters", expected.size()}};
}

/// All-reduce of a large tensor in shared memory: every rank's copy is read once and written once.
Json measure_all_reduce(const lockstep::Context& context, double triad_gb_per_s) {
  const torch::Tensor tensor = context.group().allocate(kReducedElements, torch::kFloat32).fill_(1);
  std::vector<double> seconds;
  for (int round = 0; round < 9; ++round) {
    context.group().barrier();
    const auto start = std::chrono::steady_clock::now();
    context.group().all_reduce(tensor, lockstep::ReduceOp::kMean);
    seconds.push_back(Seconds(std::chrono::steady_clock::now() - start).count());
  }
  std::sort(seconds.begin(), seconds.end());
  const double bytes = static_cast<double>(tensor.nbytes()), median = seconds[seconds.size() / 2];
  const double moved = 2 * bytes * context.world_size() / median * 1e-9;
  return {{"bytes", tensor.nbytes()},
          {"milliseconds", median * 1e3},
          {"gb_per_s", moved},
          {"triad_gb_per_s", triad_gb_per_s},
          {"share_of_triad", triad_gb_per_s > 0 ? moved / triad_gb_per_s : 0},
          {"correct", tensor.eq(1).all().item<bool>()}};
}

void probe(const std::string& backend, bool is_first) {
  Json found;
  double triad = 0;
  if (backend.empty() && is_first) {
    // Before there are threads; the other rank waits meanwhile.
    const auto rates = lockstep::bench::measure_triad(2, kTriadBytes, 3);
    triad = std::max(rates.plain_gb_per_s, rates.streaming_gb_per_s);
  }
  lockstep::Context context({.backend = backend, .announce = false});
  found["backend"] = context.group().backend();
  if (backend.empty()) {
    found["torch"] = about_torch();
    found["threads_of_two_ranks"] = context.threads();
    found["gradients"] = check_gradients(context);
    found["all_reduce"] = measure_all_reduce(context, triad);
    if (context.is_main()) found["bits"] = lockstep::result_bits();
  } else {
    const auto ones = torch::ones({3});
    context.group().all_reduce(ones);
    found["works"] = ones.eq(context.world_size()).all().item<bool>();
  }
  if (context.is_main()) std::printf("%s\n", found.dump().c_str());
}

}  // namespace

int main(int argc, char** argv) {
  try {
    probe(argc > 1 ? argv[1] : "", lockstep::Environment::from_process().rank.value_or("0") == "0");
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "doctor_probe: %s\n", error.what());
    return 1;
  }
}
