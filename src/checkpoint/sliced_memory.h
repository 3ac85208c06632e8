#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace lockstep {

/// The division of memory into slices of equal size, one per rank in rank order. A rank fills its own slice. The
/// others' slices are zeros and take no memory until they are brought.
struct Slices {
  int ranks;
  int rank;  ///< this one
  size_t bytes;

  size_t begin() const { return bytes * static_cast<size_t>(rank); }
};

/// [ranks * elements] zeros, whose pages take memory only when written.
at::Tensor sliced_zeros(int64_t elements, at::ScalarType dtype, int ranks, int rank);

/// The division of such a tensor's memory; null for any other.
const Slices* slices_of(const c10::Storage& storage);

/// Zeroes all but this rank's slice, and frees the pages that lie wholly outside it.
void forget_other_slices(const at::Tensor& tensor);

}  // namespace lockstep
