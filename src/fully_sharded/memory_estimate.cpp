#include <lockstep/memory_estimate.h>

#include <algorithm>
#include <cmath>
#include <unordered_set>

#include <lockstep/sharded_unit.h>

#include "base/shared_segment.h"
#include "base/text.h"
#include "optim/step_plan.h"

namespace lockstep {
namespace {

/// Bytes of parameters, each counted once.
class Counted {
 public:
  /// The bytes of parameters not counted before.
  int64_t add(const torch::nn::Module& module) {
    int64_t bytes = 0;
    for (const auto& item : module.named_parameters()) {
      const at::Tensor& parameter = item.value();
      if (!parameter.defined() || !seen_.insert(parameter.unsafeGetTensorImpl()).second) continue;
      bytes += static_cast<int64_t>(parameter.nbytes());
      if (!parameter.requires_grad()) continue;
      trained_ += static_cast<int64_t>(parameter.nbytes());
      largest_trained_ = std::max(largest_trained_, static_cast<int64_t>(parameter.nbytes()));
    }
    return bytes;
  }
  /// The bytes of all added parameters that are trained.
  int64_t trained() const { return trained_; }
  /// The bytes of the largest of these.
  int64_t largest_trained() const { return largest_trained_; }

 private:
  std::unordered_set<const c10::TensorImpl*> seen_;
  int64_t trained_ = 0, largest_trained_ = 0;
};

/// By how much larger a unit's gradients are while ranks and machines add them: then 16 bits are added in float.
int64_t widening(const torch::nn::Module& unit, const MemoryEstimateOptions& options) {
  const auto parameters = unit.parameters();
  const bool is_narrow = !parameters.empty() && optim::is_16_bit(parameters.front().scalar_type());
  return is_narrow && options.machines > 1 && options.ranks_per_machine > 1 ? 2 : 1;
}

std::string mebibytes(int64_t bytes) {
  return formatted("%.0f MiB", std::ceil(static_cast<double>(bytes) / (1 << 20)));
}

}  // namespace

std::vector<MemoryNeed> estimate_memory(const torch::nn::Module& module, const MemoryEstimateOptions& options) {
  TORCH_CHECK(options.machines > 0 && options.ranks_per_machine > 0, "estimate_memory: ", options.machines,
              " machines of ", options.ranks_per_machine, " ranks; at least 1 of each");
  TORCH_CHECK(
      options.state_per_parameter >= 0 && std::isfinite(options.state_per_parameter) && options.activation_bytes >= 0,
      "estimate_memory: state_per_parameter and activation_bytes must be at least 0");
  Counted counted;
  int64_t in_units = 0, largest = 0, largest_added = 0;
  for (const auto& item : module.named_modules("", /*include_self=*/false)) {
    if (dynamic_cast<const detail::UnitBase*>(item.value().get()) == nullptr) continue;
    const int64_t bytes = counted.add(*item.value());
    in_units += bytes;
    largest = std::max(largest, bytes);
    largest_added = std::max(largest_added, bytes * widening(*item.value(), options));
  }
  const int64_t rest = counted.add(module), parameters = in_units + rest;
  TORCH_CHECK(parameters > 0, "estimate_memory: the module has no parameters");
  const int64_t gradients = counted.trained();
  const auto state = static_cast<int64_t>(static_cast<double>(gradients) * options.state_per_parameter);
  const int64_t machines = options.machines, here = options.ranks_per_machine, all = machines * here;

  std::vector<MemoryNeed> needs;
  const auto add = [&](const char* name, int64_t rank, int64_t shared) {
    rank += options.activation_bytes;
    needs.push_back({.name = name, .rank_bytes = rank, .shared_bytes = shared, .machine_bytes = here * rank + shared});
  };
  add("DistributedDataParallel", parameters + gradients + state, 0);
  add("with ZeroRedundancyOptimizer", parameters + gradients + state / all, 0);
  add("with .shared_parameters = true", gradients, parameters + state / machines);
  // Each rank has its gradients of a unit, and the one that autograd is computing. While the last unit's sums are on
  // their way to other machines, as many of this one's wait. On one machine nothing is gathered.
  if (largest == 0) return needs;
  const int64_t own = (parameters + gradients + state) / all + largest_added + counted.largest_trained() +
                      (machines > 1 ? largest / here : 0);
  add("FullyShardedDataParallel", own, machines > 1 ? 2 * largest + rest : 0);
  if (machines > 1) add("with .keep_gathered = true", own, parameters);
  return needs;
}

std::string memory_table(const std::vector<MemoryNeed>& needs, int64_t available_bytes) {
  const int64_t available = available_bytes >= 0 ? available_bytes : static_cast<int64_t>(available_memory_bytes());
  std::string table = formatted("%-32s%14s%14s%14s\n", "", "each rank", "shared", "machine");
  for (const MemoryNeed& need : needs)
    table += formatted("%-32s%14s%14s%14s  %s\n", need.name.c_str(), mebibytes(need.rank_bytes).c_str(),
                       mebibytes(need.shared_bytes).c_str(), mebibytes(need.machine_bytes).c_str(),
                       need.machine_bytes <= available ? "fits" : "too much");
  return table + "available here: " + mebibytes(available) +
         "; LibTorch itself takes about 100 MiB of it for each rank\n";
}

}  // namespace lockstep
