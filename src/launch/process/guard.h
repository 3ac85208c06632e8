#pragma once

#include <sys/types.h>

#include "base/file_descriptor.h"

namespace lockstep {

/// A small second process that outlives the launcher by an instant: when the launcher is gone without having
/// ended it first (SIGKILL), it kills the process groups of the ranks. The kernel kills the ranks themselves then
/// (PR_SET_PDEATHSIG), but not the processes that they have started.
class Guard {
 public:
  /// Throws LaunchError when there are no more processes to have.
  Guard();
  /// Ends the guard, without it doing anything.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Where the leader of a group to kill writes its pid, as a pid_t. It does so itself, before it can have started
  /// anything: the launcher may be killed right after it has made it.
  int registry() const { return pipe_.get(); }
  /// The group is gone, and its number may come to mean another. To be called while the leader is still a zombie.
  void forget(pid_t group) const;

 private:
  pid_t pid_ = -1;
  FileDescriptor pipe_;
};

}  // namespace lockstep
