#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace lockstep {

/// How memory is cut into slices of equal size, one for each rank in their order. A rank fills its own; the others' are
/// zeros there, and take no memory, unless somebody has brought them.
struct Slices {
  int ranks;
  int rank;  ///< this one
  size_t bytes;

  size_t begin() const { return bytes * static_cast<size_t>(rank); }
};

/// [ranks * elements] zeros, of which the machine gives memory only to those pages that somebody writes.
at::Tensor sliced_zeros(int64_t elements, at::ScalarType dtype, int ranks, int rank);

/// How such a tensor's memory is cut; null for any other.
const Slices* slices_of(const c10::Storage& storage);

/// Makes all but this rank's slice zeros again, and gives their pages back, where these are whole.
void forget_other_slices(const at::Tensor& tensor);

}  // namespace lockstep
