#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// What an engine whose ranks share memory offers besides c10d's interface: to read and write what lies in another
/// rank's memory, or in memory that belongs to all of them. When a rank may do so is the caller's affair: between two
/// barriers. On several machines it is the ranks of each that share memory; every rank of the group calls, all the
/// same.
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

/// What allocate_together() gives to a rank that is alone on its machine.
at::Tensor allocate_alone(int64_t elements, const at::TensorOptions& options);

/// Whether it lies in memory of allocate_together(): a write by one rank is everybody's.
bool is_owned_together(const at::Tensor& tensor);

}  // namespace lockstep
