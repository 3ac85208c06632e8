#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include <ATen/core/Tensor.h>

#include "base/hash.h"

namespace lockstep {

/// Three elements of a CPU tensor: tensors that differ, or were changed, as a whole differ in them.
inline uint64_t sample_of(const at::Tensor& tensor) {
  uint64_t hash = Hash::kStart;
  const auto* bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  const size_t size = tensor.is_non_overlapping_and_dense() ? tensor.nbytes() : 0, piece = std::min<size_t>(size, 8);
  for (const size_t at : {size_t{0}, (size - piece) / 2, size - piece}) {
    uint64_t word = 0;
    if (piece > 0) std::memcpy(&word, bytes + at, piece);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

/// A hash of samples of the tensors that are on the CPU.
inline uint64_t samples_of(const std::vector<at::Tensor>& tensors) {
  uint64_t hash = Hash::kStart;
  for (const at::Tensor& tensor : tensors)
    if (tensor.is_cpu()) hash = Hash::mixed(hash, sample_of(tensor));
  return hash;
}

}  // namespace lockstep
