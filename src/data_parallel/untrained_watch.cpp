#include "data_parallel/untrained_watch.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "data_parallel/divergence.h"

namespace lockstep {
namespace {

constexpr int kReductionsWithoutAChange = 10;
constexpr size_t kNamesInAWarning = 3;

bool is_among(const NamedTensors& list, const at::Tensor& tensor) {
  return std::any_of(list.begin(), list.end(), [&](const auto& named) { return named.second.is_same(tensor); });
}

std::string warning(const std::vector<std::string>& names) {
  std::string list;
  for (size_t i = 0; i < std::min(names.size(), kNamesInAWarning); ++i) list += (i == 0 ? "" : ", ") + names[i];
  if (names.size() > kNamesInAWarning) list += " and " + std::to_string(names.size() - kNamesInAWarning) + " more";
  return "no optimizer seems to hold a parameter that refresh() added: " + list + " had a gradient " +
         std::to_string(kReductionsWithoutAChange) +
         " reductions ago and has not changed since; add it to the optimizer (add_param_group), or create the "
         "optimizer again";
}

}  // namespace

void UntrainedWatch::refreshed(const NamedTensors& before, const NamedTensors& now) {
  std::erase_if(parameters_, [&](const Parameter& one) { return !is_among(now, one.tensor); });
  for (const auto& [name, tensor] : now)
    if (!is_among(before, tensor)) parameters_.push_back({.name = name, .tensor = tensor});
}

std::string UntrainedWatch::after_reduction() {
  if (parameters_.empty()) return "";
  std::vector<std::string> unchanged;
  std::erase_if(parameters_, [&](Parameter& one) {
    if (one.reductions == -1) {
      const at::Tensor& gradient = one.tensor.grad();
      if (!gradient.defined() || gradient.count_nonzero().item<int64_t>() == 0) return false;
      one.values = hash_of(one.tensor);
    }
    if (++one.reductions < kReductionsWithoutAChange) return false;
    if (hash_of(one.tensor) == one.values) unchanged.push_back(one.name);
    return true;
  });
  return unchanged.empty() ? "" : warning(unchanged);
}

}  // namespace lockstep
