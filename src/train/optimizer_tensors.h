#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <ATen/ops/isfinite.h>
#include <torch/optim/optimizer.h>

#include "reducer/gradient_marks.h"

namespace lockstep {

// The parts of an optimizer that a GradScaler reads.

inline std::vector<at::Tensor> list_of_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

inline TensorSet set_of(const std::vector<at::Tensor>& parameters) {
  TensorSet set;
  for (const at::Tensor& parameter : parameters) set.insert(parameter.unsafeGetTensorImpl());
  return set;
}

inline bool any_of_set(const std::vector<at::Tensor>& parameters, const TensorSet& set) {
  return std::any_of(parameters.begin(), parameters.end(),
                     [&](const at::Tensor& parameter) { return set.contains(parameter.unsafeGetTensorImpl()); });
}

/// Distinguishes an optimizer from any other, including one of other parameters made at the same address.
inline uint64_t identity_of(const torch::optim::Optimizer& optimizer) {
  uint64_t identity = Hash::mixed(Hash::kStart, reinterpret_cast<uintptr_t>(&optimizer));
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params())
      identity = Hash::mixed(identity, reinterpret_cast<uintptr_t>(parameter.unsafeGetTensorImpl()));
  return identity;
}

/// Gradients that one operation divides, with one device and dtype.
using GradientGroups = std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>>;

inline GradientGroups gradients_of(torch::optim::Optimizer& optimizer) {
  GradientGroups groups;
  for (auto& group : optimizer.param_groups())
    for (at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      TORCH_CHECK(gradient.scalar_type() != at::kHalf,
                  "GradScaler: a gradient is half; keep the parameters in float and use autocast()");
      TORCH_CHECK(gradient.layout() == at::kStrided, "GradScaler: sparse gradients cannot be unscaled");
      groups[{gradient.scalar_type(), gradient.device().str()}].push_back(gradient);
    }
  return groups;
}

inline bool any_is_not_zero(torch::optim::Optimizer& optimizer) {
  for (const auto& [kind, gradients] : gradients_of(optimizer))
    for (const at::Tensor& gradient : gradients)
      if (gradient.any().item<bool>()) return true;
  return false;
}

/// Whether there are gradients, but none has an element, as when this rank's parts are empty.
inline bool all_are_empty(torch::optim::Optimizer& optimizer) {
  const GradientGroups groups = gradients_of(optimizer);
  return !groups.empty() && std::all_of(groups.begin(), groups.end(), [](const auto& group) {
    return std::all_of(group.second.begin(), group.second.end(),
                       [](const at::Tensor& gradient) { return gradient.numel() == 0; });
  });
}

inline bool all_are_finite(torch::optim::Optimizer& optimizer) {
  for (const auto& [kind, gradients] : gradients_of(optimizer))
    for (const at::Tensor& gradient : gradients)
      if (!at::isfinite(gradient).all().item<bool>()) return false;
  return true;
}

/// 0: there is no gradient.
inline std::vector<uint64_t> marks_of_gradients(const std::vector<at::Tensor>& parameters) {
  std::vector<uint64_t> marks;
  for (const at::Tensor& parameter : parameters)
    marks.push_back(parameter.grad().defined() ? Hash::mixed(mark_of(parameter.grad()), 1) : 0);
  return marks;
}

}  // namespace lockstep
