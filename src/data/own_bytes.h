#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The bytes of `values` as a uint8 tensor of `shape`, which owns them.
at::Tensor own_bytes(std::vector<uint8_t> values, at::IntArrayRef shape);

}  // namespace lockstep
