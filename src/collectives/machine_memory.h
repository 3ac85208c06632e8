#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

namespace lockstep {

/// Access of ranks that share memory to another rank's memory, and to memory that all of them own. The caller ensures,
/// between two barriers, that access is safe. On several machines the ranks of each machine share memory; every rank of
/// the group still makes each call.
class MachineMemory {
 public:
  virtual ~MachineMemory() = default;

  /// The number of ranks that share memory with this one, itself included, and this rank's number among them.
  virtual int ranks_here() const = 0;
  virtual int rank_here() const = 0;

  /// [elements] zeros mapped by all ranks, as one tensor on each. The memory lives as long as the last of these
  /// tensors. Throws Error on all ranks, naming the size, if a machine has too little memory.
  /// REQUIRES: every rank calls it with the same arguments.
  virtual at::Tensor allocate_together(int64_t elements, const at::TensorOptions& options) = 0;

  /// The addresses in this process of each rank's `mine`, memory from Group::allocate(). They are valid as long as the
  /// group.
  /// REQUIRES: every rank calls it, with memory of the same size.
  virtual std::vector<std::byte*> address_everywhere(const at::Tensor& mine) = 0;

  /// Of `mine`, memory from Group::allocate(): the place where another rank finds it, as memory_of(this rank, place).
  /// None: no other rank can. Does not communicate.
  virtual std::optional<uint64_t> place_of(const at::Tensor& mine) const = 0;
  /// Null if that rank's memory is not visible here. Valid as long as the group.
  virtual const std::byte* memory_of(int rank, uint64_t place) const = 0;
};

/// An optional engine interface: the ranks of a machine share memory.
class SharesMemory {
 public:
  virtual ~SharesMemory() = default;
  virtual MachineMemory& machine_memory() = 0;
};

/// Null if the group's ranks share no memory. Valid as long as the group.
MachineMemory* machine_memory_of(const Group& group);

/// The counterpart of allocate_together() for a rank that is alone on its machine.
at::Tensor allocate_alone(int64_t elements, const at::TensorOptions& options);

/// Whether the tensor lies in memory of allocate_together(), where all ranks see a write by one.
bool is_owned_together(const at::Tensor& tensor);

}  // namespace lockstep
