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

  void watch(pid_t group);

 private:
  pid_t pid_ = -1;
  FileDescriptor pipe_;
};

}  // namespace lockstep
