#pragma once

#include <string>
#include <vector>

#include "base/mutex.h"
#include "collectives/call_place.h"
#include "fully_sharded/machine_groups.h"

namespace lockstep {
class GroupsWatch;
}

namespace lockstep::fully_sharded {

/// Tells all ranks when one cannot continue in the middle of a forward or backward, or has destroyed its model. The
/// ranks wait in different groups, so no engine can tell them; they learn it through the group's store, while they wait
/// (GroupsWatch).
class FailureWatch {
 public:
  /// `model` is its number among the group's models.
  FailureWatch(const MachineGroups& groups, int model);
  /// Records that this rank makes no more calls of the model; ranks that wait for it are told.
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  /// The object of the model's calls.
  const CallPlace::Caller& caller() const { return caller_; }

  /// Reports that this rank cannot continue because of `trouble`. If all ranks report that within a second, nothing
  /// else happens, since they are at the same place. Otherwise it ends the waits of all ranks, and their groups. Called
  /// on the training thread.
  void tell(const std::string& trouble) noexcept;
  /// The ranks that have destroyed their model: "rank 3 has destroyed its model"; empty if none is known to have.
  std::string departed() const noexcept;

 private:
  std::string key(int rank) const { return caller_.scope + '/' + std::to_string(told_) + '/' + std::to_string(rank); }
  /// Whether all ranks report within a second that they cannot continue.
  bool all_have_trouble() const;

  const MachineGroups& groups_;
  const CallPlace::Caller caller_;
  GroupsWatch* const watch_;  ///< null: there is only one rank
  int told_ = 0;              ///< how often all ranks have reported that they cannot continue
};

}  // namespace lockstep::fully_sharded
