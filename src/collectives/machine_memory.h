#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// An optional engine interface for ranks that share memory: access to another rank's memory, and to memory that all of
/// them own. The caller ensures that access is safe, between two barriers. On several machines the ranks of each
/// machine share memory; every rank of the group still makes each call.
class MachineMemory {
 public:
  virtual ~MachineMemory() = default;

  /// The ranks that share memory with this one, which is one of them, and its number among them.
  virtual int ranks_here() const = 0;
  virtual int rank_here() const = 0;

  /// [elements] zeros that all ranks map, for a tensor each; the memory goes with the last of these. Every rank calls
  /// it with the same arguments. Throws Error on all ranks, naming the size, when a machine has not enough.
  virtual at::Tensor allocate_together(int64_t elements, const at::TensorOptions& options) = 0;

  /// Where each rank's `mine`, memory from Group::allocate(), lies in this process. It stays there as long as the
  /// group. Every rank calls it, with memory of the same size.
  virtual std::vector<std::byte*> address_everywhere(const at::Tensor& mine) = 0;
};

/// The counterpart of allocate_together() for a rank that is alone on its machine.
at::Tensor allocate_alone(int64_t elements, const at::TensorOptions& options);

/// Whether it lies in memory of allocate_together(): a write by one rank is everybody's.
bool is_owned_together(const at::Tensor& tensor);

}  // namespace lockstep
