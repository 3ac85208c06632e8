#pragma once

#include <string>

namespace lockstep::bench {

struct MemoryBenchOptions {
  std::string folder;
  std::string model = "mlp";  ///< of bench/step/models.h
  bool sharded = false;       ///< ZeroRedundancyOptimizer with shared parameters instead of LibTorch's AdamW
  int rounds = 9;
  int steps = 10;  ///< with saves and without, in each round
};

/// What a save to memory after every step costs: steps of a model with AdamW, with saves and without in turn, on the
/// ranks that run this. Returns rank 0's figures as JSON; rank 0 prints them.
std::string bench_memory(const MemoryBenchOptions& options);

}  // namespace lockstep::bench
