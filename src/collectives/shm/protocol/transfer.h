#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "collectives/shm/kernels/reduce.h"
#include "collectives/shm/protocol/request.h"
#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

/// A part of a buffer, in bytes.
struct Range {
  size_t begin, end;
  size_t bytes() const { return end - begin; }
};
/// The part that `rank` sums of a buffer of so many bytes. Parts begin at multiples of `to`.
inline Range slice_of(int rank, int ranks, size_t bytes, size_t to) {
  const auto n = static_cast<size_t>(ranks), r = static_cast<size_t>(rank);
  const size_t part = Geometry::round_up((bytes + n - 1) / n, to);
  return {std::min(bytes, r * part), std::min(bytes, (r + 1) * part)};
}

/// Which bytes an operation moves between which ranks: pure copying and reducing, no flags and no waiting.
///
/// The data that a rank gives to the others is its package: one block for all of them (broadcast, gather, reduce, ...)
/// or one block for each (scatter, reduce_scatter, all_to_all). A package is moved whole or in rounds; a round is a
/// range [begin, end) of every block.
class Transfer {
 public:
  Transfer(const Request& request, int rank, int size)
      : request_(request),
        rank_(rank),
        size_(size),
        element_(element_bytes(request.type)),
        block_bytes_(request.count * element_),
        per_rank_(request.kind == OperationKind::kScatter || request.kind == OperationKind::kReduceScatter ||
                  request.kind == OperationKind::kAllToAll || request.kind == OperationKind::kAllToAllUneven) {}

  size_t block_bytes() const { return block_bytes_; }
  bool has_block_per_rank() const { return per_rank_; }
  /// The part of an all_reduce in slices that `rank` sums: whole pages of a large one.
  Range slice(int rank) const {
    return slice_of(rank, size_, block_bytes_, block_bytes_ >= (size_t{1} << 20) ? 4096 : kCacheLine);
  }
  size_t package_bytes() const { return per_rank_ ? block_bytes_ * static_cast<size_t>(size_) : block_bytes_; }

  /// Whether `rank` gives data to others, takes data from others, or takes data from `from` in particular.
  bool gives(int rank) const { return role(rank, /*of_root=*/true); }
  bool takes(int rank) const { return role(rank, /*of_root=*/false); }
  bool takes_from(int rank, int from) const { return rank != from && takes(rank) && gives(from); }

  /// Bytes that this rank sends to one rank, and receives from one rank.
  size_t send_bytes(int to) const;
  size_t receive_bytes(int from) const;

  /// Bytes of the largest block that this rank sends or receives.
  size_t longest_bytes() const;

  /// The contiguous input of this rank's package, or null if it is in pieces.
  const void* contiguous_input() const;

  /// all_reduce in slices: writes the package to `to`, but for this rank's own slice.
  void pack_for_slices(std::byte* to) const;

  /// Writes [begin, end) of every block to `to` + block number * stride. Of several blocks this rank's own is left out.
  void pack(std::byte* to, size_t stride, size_t begin, size_t end) const;

  /// Takes [begin, end) of this rank's block out of every package. `from[p]` points to byte `begin` of that block in
  /// rank p's package, for every p that this rank takes from. Reductions call `reduce`, with this rank's own input in
  /// its place.
  void unpack(const std::byte* const* from, size_t begin, size_t end, ReduceFunction reduce,
              const double* factors) const;

  /// Copies this rank's own block, whole. Does nothing for reductions.
  void keep_own() const;

 private:
  /// Whether `rank` gives (of_root: as the root of a broadcast does) or takes (as the other ranks do).
  bool role(int rank, bool of_root) const {
    switch (request_.kind) {
      case OperationKind::kBarrier:
        return false;
      case OperationKind::kBroadcast:
      case OperationKind::kScatter:
        return (rank == request_.root) == of_root;
      case OperationKind::kReduce:
      case OperationKind::kGather:
        return (rank == request_.root) != of_root;
      default:
        return true;
    }
  }
  /// What all ranks read and write, if it is as much as on this one. Of operations that only move data.
  size_t touched_bytes() const;
  const std::byte* input_block(int rank) const;
  std::byte* output_block(int rank) const;

  const Request& request_;
  int rank_;
  int size_;
  size_t element_;
  size_t block_bytes_;
  bool per_rank_;
};

}  // namespace lockstep::shm
