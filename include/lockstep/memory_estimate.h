#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <string>
#include <vector>

#include <torch/nn/module.h>

namespace lockstep {

struct MemoryEstimateOptions {
  int machines = 1;
  int ranks_per_machine = 1;
  /// The optimizer's numbers for each parameter: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD.
  double state_per_parameter = 2;
  /// Bytes of activations of a rank, and of what else its program holds.
  int64_t activation_bytes = 0;
};

/// What one way to train a model needs.
struct MemoryNeed {
  std::string name;
  int64_t rank_bytes = 0;     ///< of each rank alone
  int64_t shared_bytes = 0;   ///< once on each machine, for its ranks together
  int64_t machine_bytes = 0;  ///< all together on each machine
};

/// The memory that training `module` needs on each machine, without LibTorch's own: for DistributedDataParallel with an
/// optimizer of LibTorch, with a ZeroRedundancyOptimizer, with its shared_parameters, and for
/// FullyShardedDataParallel, whose units are the module's ShardedUnits. Looks at shapes and dtypes alone, so parameters
/// may be on the meta device. docs/large_models.md has the formulas, beside what was measured. TORCH_CHECK fails for
/// numbers of machines and ranks below 1, negative sizes, and a module without parameters. No message.
std::vector<MemoryNeed> estimate_memory(const torch::nn::Module& module, const MemoryEstimateOptions& options = {});

/// The estimate as a table, a line for each way, and whether it fits the memory that this machine, or this process's
/// control group, has available: at most `available_bytes`, or, if that is negative, what the system says.
std::string memory_table(const std::vector<MemoryNeed>& needs, int64_t available_bytes = -1);

}  // namespace lockstep
