#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace lockstep {

constexpr size_t kMaxDimensions = 64;  ///< files with more are refused

/// A tensor of a .pt or .safetensors file, without its bytes.
struct TensorEntry {
  std::string name;
  const Dtype* dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  ///< of its bytes, after the header of a .safetensors file; elsewhere `begin` is 0
  /// Equal for tensors that share memory; distinct in a .safetensors file.
  size_t storage = 0;

  uint64_t bytes() const { return end - begin; }
};

}  // namespace lockstep
