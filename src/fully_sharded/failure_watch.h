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

/// Tells all ranks what keeps them from going on, where they wait in groups of some ranks each, so that no engine sees
/// it: that one cannot go on in the middle of a forward or backward, or has destroyed its model. They learn it through
/// the group's store, while they wait (GroupsWatch).
class FailureWatch {
 public:
  /// `model`: its number among the group's models.
  FailureWatch(const MachineGroups& groups, int model);
  /// This rank calls nothing more of the model: ranks that wait for it are told.
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  /// Of the model's calls.
  const CallPlace::Caller& caller() const { return caller_; }

  /// This rank cannot go on: `trouble`. Where all ranks say so within a second, nothing else happens, since they are at
  /// the same place. Otherwise the waits of all ranks end with it, and their groups. The thread that trains calls it.
  void tell(const std::string& trouble) noexcept;
  /// The ranks that have destroyed their model: "rank 3 has destroyed its model"; empty if none is known to have.
  std::string departed() const noexcept;

 private:
  std::string key(int rank) const { return caller_.scope + '/' + std::to_string(told_) + '/' + std::to_string(rank); }
  /// Whether all ranks say within a second that they cannot go on.
  bool all_have_trouble() const;

  const MachineGroups& groups_;
  const CallPlace::Caller caller_;
  GroupsWatch* const watch_;  ///< null: there is one rank
  int told_ = 0;              ///< how often all ranks have said that they cannot go on
};

}  // namespace lockstep::fully_sharded
