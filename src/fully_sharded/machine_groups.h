#pragma once

#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "collectives/machine_memory.h"

namespace lockstep::fully_sharded {

/// Where the ranks of a group are, and the groups in which they share out a unit. A machine is what shares memory: of
/// an engine without shared memory, each rank by itself.
///
/// Rank `l` of each machine forms a rail with the ranks `l` of all others. A unit's memory is one piece for each rail,
/// one after the other, and within it one slice for each machine. So a rail gathers its piece where it is to lie, and
/// what a machine's ranks have computed is summed within the machine by a reduce_scatter to rails, and between machines
/// by a reduce_scatter within each rail: the balanced tree over all ranks, of which each machine is a whole subtree.
class MachineGroups {
 public:
  /// Every rank makes it. Throws on all ranks where the machines' ranks form no such subtrees. `nonce`: see nonce().
  MachineGroups(const Group& group, std::string nonce);
  /// Those that another model of the group has, if it is there on all ranks, so that ranks which use the models in
  /// another order meet and are told; or new ones. Every rank calls it.
  static std::shared_ptr<const MachineGroups> of(const Group& group);

  const Group& all() const { return all_; }
  /// The same on all ranks, and no other's, of this run or an earlier one over the same store.
  const std::string& nonce() const { return nonce_; }
  /// The ranks of this machine; null if there is only this one.
  const Group* here() const { return here_ ? &*here_ : nullptr; }
  /// The ranks of this rank's rail; null if there is one machine.
  const Group* rail() const { return rail_ ? &*rail_ : nullptr; }

  int machines() const { return all_.world_size() / ranks_here_; }
  int ranks_here() const { return ranks_here_; }
  int rank_here() const { return rank_here_; }
  /// The number of this rank's slice among all ranks'.
  int slice() const { return rank_here_ * machines() + all_.rank() / ranks_here_; }

  /// Zeros that all ranks of the machine map. Every rank calls it.
  at::Tensor allocate_together(int64_t elements, at::ScalarType dtype) const;
  /// Zeros for all ranks' slices of so many elements, of which each rank has its own, in memory or in a file in
  /// `folder` (checkpoint/sliced_memory.h).
  at::Tensor allocate_in_slices(int64_t slice_elements, at::ScalarType dtype, const std::string& folder = "") const;
  /// Memory that the ranks of the machine add up where it lies.
  at::Tensor allocate_summed(int64_t elements, at::ScalarType dtype) const;
  /// Returns when all ranks of the machine have called it.
  void wait_for_machine() const {
    if (here_) here_->barrier();
  }
  /// What one rank sends to the others of its rail when it gathers or adds up pieces of slices of so many bytes.
  int64_t bytes_sent(int64_t slice_bytes) const { return slice_bytes * (machines() - 1); }

 private:
  const Group all_;
  const std::string nonce_;
  MachineMemory* const memory_;
  int ranks_here_, rank_here_;
  std::optional<Group> here_, rail_;
};

}  // namespace lockstep::fully_sharded
