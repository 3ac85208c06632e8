// One process that trains one of bench/step's models on a GPU, in C++; scripts/gpu_proof tells it when. gpu_worker.py
// is the same in Python.
//
//     gpu_worker alone|ddp resnet18|gpt
//
// Reads the number of steps to make from each line, and writes {"step_ms": ..., "loss": ..., "peak_mib": ...}: the mean
// time of these steps, the loss of the last one and the most memory that tensors have taken so far.

#include <chrono>
#include <iostream>
#include <string>

#include <ATen/cuda/CUDAContext.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <lockstep/lockstep.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "step/models.h"

namespace {

using lockstep::bench::Batch;
using lockstep::bench::Model;

void serve(Model& model, const Batch& batch) {
  torch::optim::SGD optimizer(model.parameters(), torch::optim::SGDOptions(1e-3).momentum(0.9));
  int steps = 0;
  while (std::cin >> steps) {
    at::Tensor loss;
    torch::cuda::synchronize();
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < steps; ++i) {
      optimizer.zero_grad();
      loss = model.loss(batch.data, batch.target);
      loss.backward();
      optimizer.step();
    }
    torch::cuda::synchronize();
    const std::chrono::duration<double, std::milli> taken = std::chrono::steady_clock::now() - start;
    const auto statistics = c10::cuda::CUDACachingAllocator::getDeviceStats(0);
    const double peak = static_cast<double>(statistics.allocated_bytes.front().peak);
    std::cout << nlohmann::json{{"step_ms", taken.count() / steps},
                                {"loss", loss.item<double>()},
                                {"peak_mib", peak / (1 << 20)}}
              << std::endl;
  }
}

int train(lockstep::Context& context, const std::string& system, const std::string& name) {
  const at::Device device(at::kCUDA, 0);
  auto model = lockstep::bench::make_model(name);
  model->to(device);
  Batch batch = lockstep::bench::make_batch(name, 0);
  batch = {batch.data.to(device), batch.target.to(device)};
  if (system == "alone") {
    serve(*model, batch);
    return 0;
  }
  lockstep::DistributedDataParallel replica(model, context.group());
  serve(*replica.module(), batch);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::cerr << "usage: gpu_worker alone|ddp MODEL\n";
    return 2;
  }
  return lockstep::run_program(argc, argv, [&] {
    lockstep::Context context;
    return train(context, argv[1], argv[2]);
  });
}
