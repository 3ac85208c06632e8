#include "reducer/reduction_plan.h"

#include <algorithm>
#include <map>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/group_state.h"

namespace lockstep {
namespace {

std::vector<ParameterSize> sizes_of(const NamedTensors& parameters) {
  std::map<std::pair<at::ScalarType, std::string>, int> kinds;
  std::vector<ParameterSize> sizes;
  for (const auto& [name, parameter] : parameters) {
    const auto key = std::make_pair(parameter.scalar_type(), parameter.device().str());
    const int kind = kinds.try_emplace(key, static_cast<int>(kinds.size())).first->second;
    sizes.push_back({static_cast<int64_t>(parameter.nbytes()), kind});
  }
  return sizes;
}

/// A rank's page has room for two names of this length.
constexpr size_t kLabelledName = 40;

/// The end of a name distinguishes layers.
std::string shortened(const std::string& name, size_t longest) {
  return name.size() <= longest ? name : "..." + name.substr(name.size() - longest + 3);
}

}  // namespace

ReductionPlan::ReductionPlan(const NamedTensors& parameters, Group over, ReductionSettings how)
    : group(std::move(over)), settings(how), places(parameters.size()) {
  for (const auto& [name, tensor] : parameters) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
  if (group.world_size() > 1) buckets = plan_buckets(sizes_of(parameters), settings.limits);
  for (size_t b = 0; b < buckets.size(); ++b) {
    for (size_t slot = 0; slot < buckets[b].size(); ++slot) places[buckets[b][slot]] = {b, slot};
    labels.push_back(describe(b, kLabelledName));
  }
  const auto virtual_ranks = several_virtual_ranks(group);
  if (virtual_ranks) row_kind = "virtual ";
  for (int row = 0; row < (virtual_ranks ? virtual_ranks->count() : group.world_size()); ++row)
    rank_of_row.push_back(virtual_ranks ? virtual_ranks->owner(row) : row);
}

ReduceOp ReductionPlan::op() const {
  return settings.reduction == GradientReduction::kMean && row_kind.empty() ? ReduceOp::kMean : ReduceOp::kSum;
}

bool ReductionPlan::weights_buckets() const {
  return settings.reduction == GradientReduction::kWeightedMean && row_kind.empty();
}

std::optional<size_t> ReductionPlan::first_of(const TensorSet& parameters) const {
  for (size_t i = 0; i < tensors.size(); ++i)
    if (parameters.contains(tensors[i].unsafeGetTensorImpl())) return i;
  return std::nullopt;
}

std::string ReductionPlan::describe(size_t bucket, size_t longest_name) const {
  const std::string first = shortened(names[buckets[bucket].front()], longest_name),
                    last = shortened(names[buckets[bucket].back()], longest_name);
  return "bucket " + std::to_string(bucket + 1) + " of " + std::to_string(buckets.size()) + " (" + first +
         (first == last ? "" : " to " + last) + ")";
}

std::shared_ptr<VirtualRanks> several_virtual_ranks(const Group& group) {
  const auto& known = state_of(group).virtual_ranks;
  return known && !known->one_each() ? known : nullptr;
}

void drop_gradients(const std::vector<at::Tensor>& tensors) {
  for (const at::Tensor& tensor : tensors) tensor.mutable_grad().reset();
}

bool gradients_are_gone(const std::vector<at::Tensor>& tensors) {
  const at::NoGradGuard no_grad;
  return std::all_of(tensors.begin(), tensors.end(), [](const at::Tensor& tensor) {
    const at::Tensor& gradient = tensor.grad();
    return !gradient.defined() || (gradient.layout() == at::kStrided && gradient.count_nonzero().item<int64_t>() == 0);
  });
}

}  // namespace lockstep
