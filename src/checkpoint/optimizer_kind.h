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

/// A tensor in the state of a parameter, under PyTorch's name: how to read it and how to set it.
struct OptimizerField {
  const char* name;
  std::function<at::Tensor(OptimizerParamState&)> get;
  std::function<void(OptimizerParamState&, const at::Tensor&)> set;
  /// Whether the state of a parameter of this group has it.
  std::function<bool(const OptimizerParamGroup&)> needed = [](const auto&) { return true; };
  bool is_scalar = false;  ///< otherwise as large as the parameter
};

/// One option of a group, under PyTorch's name.
struct OptimizerOption {
  const char* name;
  std::function<c10::IValue(const OptimizerOptions&)> get;
  /// Takes what Python may have written; throws Error for values that the option cannot have.
  std::function<void(OptimizerOptions&, const c10::IValue&)> set;
};

struct OptimizerKind {
  std::vector<OptimizerField> fields;
  std::vector<OptimizerOption> options;
  /// Options that only Python's optimizer of this name has, with the one value that matches C++'s.
  std::vector<std::pair<const char*, c10::IValue>> fixed;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
  bool remembers_from_start = false;  ///< a parameter without a state is an error
  bool masters = false;               ///< what belongs to 16-bit parameters is float
};

/// TORCH_CHECK fails for an unknown optimizer.
OptimizerKind kind_of(const Optimizer& optimizer);

/// A number as Python may have written it. Throws Error, with the end of a sentence, for anything else.
double number_of(const c10::IValue& value);

}  // namespace lockstep
