#include "diloco/fragment.h"

#include <algorithm>
#include <numeric>
#include <tuple>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "collectives/machine_memory.h"

namespace lockstep::diloco {

std::vector<std::vector<size_t>> fragments_of(const std::vector<int64_t>& sizes, int64_t fragments) {
  std::vector<size_t> by_size(sizes.size());
  std::iota(by_size.begin(), by_size.end(), size_t{0});
  std::stable_sort(by_size.begin(), by_size.end(), [&](size_t a, size_t b) { return sizes[a] > sizes[b]; });
  std::vector<std::vector<size_t>> result(static_cast<size_t>(fragments));
  std::vector<int64_t> loads(result.size());
  for (const size_t parameter : by_size) {
    size_t least = 0;
    for (size_t i = 1; i < result.size(); ++i)
      if (std::tuple(loads[i], result[i].size()) < std::tuple(loads[least], result[least].size())) least = i;
    result[least].push_back(parameter);
    loads[least] += sizes[parameter];
  }
  for (auto& one : result) std::sort(one.begin(), one.end());
  return result;
}

Fragment::Fragment(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
  for (const at::Tensor& parameter : parameters_) elements_ += parameter.numel();
}

at::Tensor Fragment::read(int64_t begin, int64_t elements) const {
  const at::NoGradGuard no_grad;
  const at::Tensor result = at::zeros({elements}, at::kFloat);
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    const int64_t first = std::max(begin, offset), last = std::min(begin + elements, offset + parameter.numel());
    if (first < last)
      result.narrow(0, first - begin, last - first)
          .copy_(parameter.detach().reshape({-1}).narrow(0, first - offset, last - first));
    offset += parameter.numel();
  }
  return result;
}

void Fragment::write(const at::Tensor& outer, double keep, bool writes_shared) const {
  const at::NoGradGuard no_grad;
  const auto share = static_cast<float>(keep);
  int64_t offset = 0;
  for (const at::Tensor& parameter : parameters_) {
    at::Tensor numbers = outer.narrow(0, offset, parameter.numel());
    offset += parameter.numel();
    if (is_owned_together(parameter) && !writes_shared) continue;
    if (keep != 0) {
      const at::Tensor own = parameter.detach().reshape({-1}).to(at::kCPU, at::kFloat, false, /*copy=*/true);
      const auto* from = numbers.const_data_ptr<float>();
      auto* mixed = own.data_ptr<float>();
      for (int64_t i = 0; i < own.numel(); ++i) mixed[i] = from[i] + share * (mixed[i] - from[i]);
      numbers = own;
    }
    at::Tensor(parameter).copy_(numbers.view(parameter.sizes()));
  }
}

}  // namespace lockstep::diloco
