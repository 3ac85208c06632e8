#pragma once

#include <utility>
#include <vector>

#include <ATen/ATen.h>

namespace lockstep::testing {

/// The sum in the order in which ranks that share memory add: level by level of a balanced binary tree.
inline at::Tensor tree_sum(std::vector<at::Tensor> inputs) {
  while (inputs.size() > 1) {
    std::vector<at::Tensor> sums;
    for (size_t i = 0; i < inputs.size(); i += 2)
      sums.push_back(i + 1 < inputs.size() ? inputs[i] + inputs[i + 1] : inputs[i]);
    inputs = std::move(sums);
  }
  return inputs.at(0);
}

}  // namespace lockstep::testing
