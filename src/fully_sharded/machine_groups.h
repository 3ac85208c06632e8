#pragma once

#include <memory>
#include <optional>
#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "collectives/machine_memory.h"

namespace lockstep::fully_sharded {

/// The machines of a group's ranks, and the groups that share a unit. The ranks of a machine share memory; with an
/// engine without shared memory, each rank is a machine of its own.
///
/// Rank `l` of each machine forms a rail with the ranks `l` of all others. A unit's memory consists of one piece for
/// each rail, and a piece of one slice for each machine. So a rail gathers its piece in place. Gradients are summed
/// within a machine by a reduce_scatter to rails, and between machines by a reduce_scatter within each rail. Together
/// these form the balanced tree over all ranks, in which each machine is a whole subtree.
class MachineGroups {
 public:
  /// Throws on all ranks if the machines' ranks do not form such subtrees. `nonce`: see nonce().
  /// REQUIRES: every rank makes one.
  MachineGroups(const Group& group, std::string nonce);
  /// The groups of another model over this group, if it exists on all ranks, so that ranks that use the models in a
  /// different order meet and are told; otherwise new ones.
  /// REQUIRES: every rank calls it.
  static std::shared_ptr<const MachineGroups> of(const Group& group);

  const Group& all() const { return all_; }
  /// Equal on all ranks, and unique among this run and earlier ones over the same store.
  const std::string& nonce() const { return nonce_; }
  /// The ranks of this machine; null if there is only this one.
  const Group* here() const { return here_ ? &*here_ : nullptr; }
  /// The ranks of this rank's rail; null if there is one machine.
  const Group* rail() const { return rail_ ? &*rail_ : nullptr; }

  int machines() const { return all_.world_size() / ranks_here_; }
  int ranks_here() const { return ranks_here_; }
  int rank_here() const { return rank_here_; }
  int slice() const { return rank_here_ * machines() + all_.rank() / ranks_here_; }

  /// Zeros that all ranks of the machine map.
  /// REQUIRES: every rank calls it.
  at::Tensor allocate_together(int64_t elements, at::ScalarType dtype) const;
  /// Zeros for all ranks' slices of this many elements, of which each rank has its own, in memory or in a file in
  /// `folder` (checkpoint/sliced_memory.h).
  at::Tensor allocate_in_slices(int64_t slice_elements, at::ScalarType dtype, const std::string& folder = "") const;
  /// Memory that the ranks of the machine sum in place.
  at::Tensor allocate_summed(int64_t elements, at::ScalarType dtype) const;
  /// Returns when all ranks of the machine have called it.
  void wait_for_machine() const {
    if (here_) here_->barrier();
  }
  /// The bytes that one rank sends to the others of its rail when it gathers or sums pieces with slices of this many
  /// bytes.
  int64_t bytes_sent(int64_t slice_bytes) const { return slice_bytes * (machines() - 1); }

 private:
  const Group all_;
  const std::string nonce_;
  MachineMemory* const memory_;
  int ranks_here_, rank_here_;
  std::optional<Group> here_, rail_;
};

}  // namespace lockstep::fully_sharded
