#pragma once

#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>

namespace lockstep {

/// The division of memory into slices of equal size, one per rank. A rank fills its own slice. The others' slices are
/// zeros and take no memory until they are fetched.
struct Slices {
  int ranks;
  int place;  ///< of this rank's slice
  size_t bytes;
  std::vector<int> holders = {};  ///< the rank of each slice, rank 0 first; empty: in rank order

  size_t begin() const { return bytes * static_cast<size_t>(place); }
  int holder(int slice) const { return holders.empty() ? slice : holders[static_cast<size_t>(slice)]; }
};

/// [ranks * elements] zeros, whose pages take memory only when written. `folder`: this rank's slice lies in a file
/// there that has no name and goes with the tensor; empty: in memory. Throws StorageError if there can be none, or
/// there is too little room.
at::Tensor sliced_zeros(int64_t elements, at::ScalarType dtype, int ranks, int place, std::vector<int> holders = {},
                        const std::string& folder = "");

/// Throws StorageError if no such file can be made in that folder. Empty: returns.
void check_state_folder(const std::string& folder);

/// The division of such a tensor's memory; null for any other.
const Slices* slices_of(const c10::Storage& storage);

/// Zeroes all but this rank's slice, and frees the pages that lie wholly outside it.
void forget_other_slices(const at::Tensor& tensor);

/// [bytes] uint8 zeros, whose pages take memory only when written, for a loaded storage of which this rank brings the
/// elements that it is going to read. The others stay zeros.
at::Tensor partial_zeros(int64_t bytes);

/// Whether a storage is such memory, so that ranks must not compare it.
bool is_partial(const c10::Storage& storage);

}  // namespace lockstep
