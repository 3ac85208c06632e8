#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

using torch::optim::Optimizer;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamGroup;
using torch::optim::OptimizerParamState;

/// A tensor in a parameter's state, under PyTorch's name, with its getter and setter.
struct OptimizerField {
  const char* name;
  std::function<at::Tensor(OptimizerParamState&)> get;
  std::function<void(OptimizerParamState&, const at::Tensor&)> set;
  /// Whether the state of a parameter in this group has the tensor.
  std::function<bool(const OptimizerParamGroup&)> needed = [](const auto&) { return true; };
  bool is_scalar = false;  ///< otherwise as large as the parameter
};

/// One option of a group, under PyTorch's name.
struct OptimizerOption {
  const char* name;
  std::function<c10::IValue(const OptimizerOptions&)> get;
  /// Sets a value that Python may have written. Throws Error for values that the option cannot have.
  std::function<void(OptimizerOptions&, const c10::IValue&)> set;
};

struct OptimizerKind {
  std::vector<OptimizerField> fields;
  std::vector<OptimizerOption> options;
  /// Options that only Python's optimizer of this name has, each with the one value that matches C++.
  std::vector<std::pair<const char*, c10::IValue>> fixed;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
  bool remembers_from_start = false;  ///< a parameter without a state is an error
  bool masters = false;               ///< the state of 16-bit parameters is float
};

/// TORCH_CHECK fails for an unknown optimizer.
OptimizerKind kind_of(const Optimizer& optimizer);

/// A number that Python may have written. Throws Error, with the end of a sentence, for anything else.
double number_of(const c10::IValue& value);

}  // namespace lockstep
