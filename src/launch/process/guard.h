#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// A small second process that outlives the launcher by an instant: if the launcher dies without having ended it first
/// (SIGKILL), it kills the process groups of the ranks, and whoever has left them but still carries this launcher's
/// mark. The kernel then kills the ranks themselves (PR_SET_PDEATHSIG), but not the processes that they started.
class Guard {
 public:
  /// With `patience` (0: none), it also kills them when it has not heard a beat for so long: an agent that is stopped
  /// has lost its run, and nobody else can end its ranks. Throws LaunchError if the system gives no more processes.
  explicit Guard(std::chrono::milliseconds patience = std::chrono::milliseconds(0));
  /// Ends the guard before it does anything.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Where the leader of a group to kill writes its pid, as a pid_t. It does so itself, before it can start
  /// anything: the launcher may be killed right after the fork.
  int registry() const { return pipe_.get(); }
  /// The group is gone, and its number may be used again. Call it while the leader is still a zombie.
  void forget(pid_t group) const;
  void beat() const;

  /// "NAME=value", of no other launcher: what ranks have in their environment, and with it all that they start. Its
  /// name is of this launcher alone, so that what a launcher below this one starts has both.
  const std::string& mark() const { return mark_; }
  /// Kills what the ranks have started that has left their groups (setsid), for up to `timeout`. For after their end.
  void kill_strays(std::chrono::milliseconds timeout) const;

 private:
  const std::string mark_;
  pid_t pid_ = -1;
  FileDescriptor pipe_;
};

}  // namespace lockstep
