#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// A small second process that briefly outlives the launcher. If the launcher dies without having ended it first
/// (SIGKILL), it kills the process groups of the ranks, and processes that have left them but still carry this
/// launcher's mark. The kernel itself kills the ranks then (PR_SET_PDEATHSIG), but not the processes that they started.
class Guard {
 public:
  /// With `patience` (0: none), it also kills them when it has heard no beat for that long: an agent that is stopped
  /// has lost its run, and nothing else can end its ranks. Throws LaunchError if the system allows no more processes.
  explicit Guard(std::chrono::milliseconds patience = std::chrono::milliseconds(0));
  /// Ends the guard without any action.
  ~Guard();
  Guard(const Guard&) = delete;
  Guard& operator=(const Guard&) = delete;

  /// Called before ranks are started: makes another guard if somebody has killed it. Throws as the constructor does.
  void renew();

  /// The descriptor to which the leader of a group to kill writes its pid, as a pid_t, before it starts anything,
  /// because the launcher may be killed right after the fork.
  int registry() const { return pipe_.get(); }
  /// The group is gone, and its number may be reused.
  /// REQUIRES: the leader is still a zombie.
  void forget(pid_t group) const;
  void beat() const;

  /// "NAME=value" in the environment of ranks and all their descendants. The name is unique to this launcher, so
  /// descendants of a nested launcher carry both marks.
  const std::string& mark() const { return mark_; }
  /// Kills descendants of ranks that have left their groups (setsid), for up to `timeout`. Called after the ranks' end.
  void kill_strays(std::chrono::milliseconds timeout) const;

 private:
  void start();

  const std::chrono::milliseconds patience_;
  const std::string mark_;
  pid_t pid_ = -1;
  FileDescriptor pipe_;
};

}  // namespace lockstep
