#pragma once

#include <cstddef>
#include <vector>

#include "collectives/hierarchical/layout.h"
#include "collectives/hierarchical/scratch.h"
#include "collectives/shm/kernels/element.h"

namespace lockstep::hierarchical_engine {

/// The additions of a reduction, piece by piece, and the type in which partial sums are sent. Partial sums of fp16 and
/// bf16 are fp32, so that there is one rounding, at the end, as in shared memory.
class PieceSum {
 public:
  /// `by_pairs`: partial sums are added pair by pair on different machines, so that fp16 and bf16 are sent as fp32 even
  /// if no machine adds any.
  PieceSum(shm::DataType type, shm::ReduceOp op, const SumOrder& order, int world_size, bool by_pairs = false);

  size_t element_bytes() const { return element_; }
  size_t travelling_bytes() const { return travelling_; }  ///< of an element of a partial sum

  /// Computes the partial sum of `inputs`, of `count` elements each. `wide`: memory for the widened inputs.
  void add_partial(std::vector<const void*> inputs, std::byte* result, size_t count, Scratch& wide) const;
  /// Writes the total of `sums`, the partial sums in order, to all `targets`. Overwrites the sums.
  void add_total(std::vector<std::byte*> sums, const std::vector<void*>& targets, size_t count) const;
  /// Adds two partial sums, in this order, into `result`, which may be either. REQUIRES: by_pairs.
  void add_pair(const std::byte* left, const std::byte* right, std::byte* result, size_t count) const;
  /// Writes a sum over all ranks to all `targets`. Overwrites the sum.
  void write_total(std::byte* sum, const std::vector<void*>& targets, size_t count) const;

 private:
  const SumOrder& order_;
  const int world_size_;
  const shm::DataType type_;
  const shm::ReduceOp op_;
  const size_t element_;  ///< bytes
  const bool widened_;    ///< partial sums are in fp32
  const shm::DataType travelling_type_;
  const size_t travelling_;
  const shm::ReduceOp addition_;  ///< a mean is a sum that is divided at the end
};

}  // namespace lockstep::hierarchical_engine
