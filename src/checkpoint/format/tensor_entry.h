#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/format/dtype.h"

namespace lockstep {

/// A tensor of a .pt or .safetensors file, without its bytes.
struct TensorEntry {
  std::string name;
  const Dtype* dtype;
  std::vector<int64_t> shape;
  uint64_t begin, end;  ///< of its bytes, behind the header of a .safetensors file; elsewhere `begin` is 0
  /// Equal for tensors that lie in the same memory; of a .safetensors file all differ.
  size_t storage = 0;

  uint64_t bytes() const { return end - begin; }
};

}  // namespace lockstep
