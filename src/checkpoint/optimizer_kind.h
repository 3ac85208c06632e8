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

/// One remembered tensor of one parameter, under PyTorch's name: how to read it and how to put it back.
struct OptimizerField {
  const char* name;
  std::function<at::Tensor(OptimizerParamState&)> get;
  std::function<void(OptimizerParamState&, const at::Tensor&)> set;
  /// Whether a parameter of the group that has a state has this in it.
  std::function<bool(const OptimizerParamGroup&)> needed = [](const auto&) { return true; };
  bool is_scalar = false;  ///< else as large as the parameter
};

/// One option of a group, under PyTorch's name.
struct OptimizerOption {
  const char* name;
  std::function<c10::IValue(const OptimizerOptions&)> get;
  /// Takes what Python may have written; throws Error for what the option cannot be.
  std::function<void(OptimizerOptions&, const c10::IValue&)> set;
};

struct OptimizerKind {
  std::vector<OptimizerField> fields;
  std::vector<OptimizerOption> options;
  /// What Python's optimizer of the name has besides, and the only value that C++'s can do.
  std::vector<std::pair<const char*, c10::IValue>> fixed;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
  bool remembers_from_start = false;  ///< a parameter without a state is an error
};

/// TORCH_CHECK fails for an optimizer that is not known here.
OptimizerKind kind_of(const Optimizer& optimizer);

/// What Python may have written for a number. Throws Error, as the end of a sentence, for anything else.
double number_of(const c10::IValue& value);

}  // namespace lockstep
