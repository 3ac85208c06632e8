#pragma once

#include <lockstep/cxx20.h>

#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// Tensors under names, in an order that is the same on every rank.
using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

}  // namespace lockstep
