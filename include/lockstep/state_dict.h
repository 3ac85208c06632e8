#pragma once

#include <lockstep/cxx20.h>

#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/api/include/torch/ordered_dict.h>

namespace lockstep {

/// Tensors by name, in order.
using StateDict = torch::OrderedDict<std::string, at::Tensor>;

}  // namespace lockstep
