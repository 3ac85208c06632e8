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
  /// State numbers of the optimizer for each parameter: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD. They
  /// are as large as the parameters; with the master_weights of 16-bit parameters twice as large, and one more: 6,
  /// 4, 2.
  double state_per_parameter = 2;
  /// Bytes of a rank's activations, and of other memory of its program.
  int64_t activation_bytes = 0;
};

/// The memory that one way of training a model needs.
struct MemoryNeed {
  std::string name;
  int64_t rank_bytes = 0;     ///< of each rank alone
  int64_t shared_bytes = 0;   ///< once on each machine, for its ranks together
  int64_t machine_bytes = 0;  ///< total on each machine
};

/// The memory that training `module` needs on each machine, without LibTorch's own, for each way:
/// DistributedDataParallel with an optimizer of LibTorch, with a ZeroRedundancyOptimizer, with its shared_parameters,
/// and FullyShardedDataParallel, whose units are the module's ShardedUnits. Uses shapes and dtypes only, so parameters
/// may be on the meta device. docs/large_models.md compares the formulas with measurements. TORCH_CHECK fails for
/// numbers of machines and ranks below 1, negative sizes, and a module without parameters. Does not communicate.
std::vector<MemoryNeed> estimate_memory(const torch::nn::Module& module, const MemoryEstimateOptions& options = {});

/// The estimate as a table, one line for each way, with whether it fits the available memory: `available_bytes` or, if
/// that is negative, what the system reports for this machine or this process's control group.
std::string memory_table(const std::vector<MemoryNeed>& needs, int64_t available_bytes = -1);

}  // namespace lockstep
