#pragma once

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <torch/optim/optimizer.h>

#include "base/hash.h"
#include "base/text.h"
#include "data_parallel/replica_state.h"
#include "optim/areas.h"
#include "optim/step_plan.h"
#include "reducer/gradient_marks.h"

// Checks that both kinds of shared step make first.

namespace lockstep::detail {

inline constexpr const char* kNoStepWithinJoin =
    "ZeroRedundancyOptimizer::step() within join(): ranks that have run out of inputs would not call it; step with the "
    "optimizer of each rank, made from the parameters";

using lockstep::sample_of;

/// A hash of all bytes of a contiguous double tensor.
inline uint64_t hash_of_all(const at::Tensor& numbers) {
  uint64_t hash = Hash::kStart;
  const auto* words = static_cast<const std::byte*>(numbers.const_data_ptr());
  for (int64_t i = 0; i < numbers.numel(); ++i) {
    uint64_t word;
    std::memcpy(&word, words + static_cast<size_t>(i) * sizeof word, sizeof word);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// A hash of samples of all gradients, which are on one device. A device's memory is read once, because each read waits
/// for the device.
inline uint64_t sample_of(const std::vector<at::Tensor>& gradients) {
  uint64_t hash = Hash::kStart;
  std::vector<at::Tensor> elements;
  for (const at::Tensor& gradient : gradients) {
    if (gradient.is_cpu()) {
      hash = Hash::mixed(hash, sample_of(gradient));
      continue;
    }
    if (gradient.numel() == 0 || !gradient.is_non_overlapping_and_dense()) continue;
    const at::Tensor flat = gradient.as_strided({gradient.numel()}, {1});
    for (const int64_t at : {int64_t{0}, gradient.numel() / 2, gradient.numel() - 1})
      elements.push_back(flat.narrow(0, at, 1));
  }
  return elements.empty() ? hash : Hash::mixed(hash, hash_of_all(at::cat(elements).to(at::kCPU, at::kDouble)));
}

inline constexpr const char* kModelIsGone =
    "ZeroRedundancyOptimizer::step(): the DistributedDataParallel that it was made from was destroyed; keep that alive "
    "for as long as the optimizer steps, in a member declared before it, say";

inline constexpr const char* kTwoThreads =
    "ZeroRedundancyOptimizer::step() was called while another thread was in it; let one thread step";

inline constexpr const char* kOtherParameters =
    ": something other than this step has changed a copy on one rank since the last step. Change the model in the same "
    "way on every rank; broadcast_parameters() sets all copies to one rank's, average_parameters() to the mean";

inline constexpr const char* kLoadTheSame =
    ", but with shared_parameters = true all ranks of a machine share one copy of them, which has what was loaded "
    "last. Load the same state on every rank; or load it on one and then call broadcast_parameters(), with that rank, "
    "on every rank";

/// A hash of three elements of each parameter. On a device, where each read waits, they are read together.
inline uint64_t sample_of_parameters(const Areas& areas) {
  if (areas.on_device()) {
    std::vector<at::Tensor> elements;
    for (const Areas::Area& area : areas.areas()) elements.push_back(area.parameters.index_select(0, area.sampled));
    return elements.empty() ? Hash::kStart : hash_of_all(at::cat(elements).to(at::kCPU, at::kDouble));
  }
  std::vector<at::Tensor> sampled;
  for (const Areas::Parameter& parameter : areas.parameters()) sampled.push_back(parameter.tensor);
  return sample_of(sampled);
}

/// A hash of three elements of each slice that `rank` steps. On the CPU.
inline uint64_t sample_of_slices(const Areas& areas, int rank) {
  std::vector<at::Tensor> slices;
  for (const Areas::Parameter& parameter : areas.parameters())
    if (const auto [begin, end] = areas.part_of(parameter, rank); begin < end)
      slices.push_back(areas.area_of(parameter).parameters.narrow(0, parameter.offset + begin, end - begin));
  return sample_of(slices);
}

/// The reason why this rank cannot step (gradients wait, or parameters are not where the step has put them); empty if
/// none.
inline std::string common_trouble(const ReplicaState& model, const torch::optim::Optimizer& optimizer,
                                  const Areas& areas) {
  if (std::string elsewhere = model.reducer->backward_elsewhere(); !elsewhere.empty()) return elsewhere;
  if (model.passes->since_reduction != 0)
    return "ZeroRedundancyOptimizer::step(): the gradients of " +
           counted(model.passes->since_reduction, "backward pass", "backward passes") +
           " wait in .grad and are this rank's alone; step after the backward that reduces them, or call "
           "reduce_gradients() "
           "first";
  const std::string problem = optim::problem_of(optimizer);
  if (!problem.empty()) return problem;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& tensor : group.params())
      if (!areas.contains(tensor))
        return "ZeroRedundancyOptimizer: a parameter was added to its groups after it was made; make a new one, of all "
               "parameters";
  for (const auto& [name, tensor] : model.attached.trained())
    if (!areas.contains(tensor))
      return "ZeroRedundancyOptimizer: refresh() has found parameter " + name +
             ", which is not in its groups; make a new optimizer, of all parameters";
  for (const Areas::Parameter& parameter : areas.parameters())
    if (parameter.tensor.const_data_ptr() != parameter.here.const_data_ptr() ||
        parameter.tensor.scalar_type() != parameter.here.scalar_type() ||
        parameter.tensor.sizes() != parameter.here.sizes() || parameter.tensor.strides() != parameter.here.strides())
      return "ZeroRedundancyOptimizer: parameter " + parameter.name +
             " is no longer in the memory where the optimizer put it (to(), set_data(), torch::load(), or another "
             "tensor in its place); make a new optimizer";
  return "";
}

}  // namespace lockstep::detail
