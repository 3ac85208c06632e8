#pragma once

#include <condition_variable>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "fully_sharded/machine_groups.h"

namespace lockstep::fully_sharded {

/// Tells all ranks what keeps one of them from going on, in the middle of a forward or backward, where the others wait
/// for it in groups of some ranks each. They learn it through the group's store: while a rank waits, a thread of it
/// looks there a few times a second. Nothing is sent while training progresses.
class FailureWatch {
 public:
  /// `model`: its number among the group's models.
  FailureWatch(const MachineGroups& groups, int model);
  ~FailureWatch();
  FailureWatch(const FailureWatch&) = delete;
  FailureWatch& operator=(const FailureWatch&) = delete;

  /// This rank cannot go on: `trouble`. Where all ranks say so within a second, nothing else happens, since they are at
  /// the same place. Otherwise the waits of all ranks end with it, and their groups. The thread that trains calls it.
  void tell(const std::string& trouble) noexcept;

 private:
  std::string key(const char* kind, int rank) const;
  bool all_have_written(const char* kind) const;
  void write(const char* kind, const std::string& text) const;
  void end_groups(const std::string& why) const;
  void watch();

  const MachineGroups& groups_;
  const std::string prefix_;
  const unsigned generation_;

  mutable Mutex mutex_;
  std::condition_variable wakes_;
  bool stops_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  bool ended_ LOCKSTEP_GUARDED_BY(mutex_) = false;  ///< the groups have
  int told_ LOCKSTEP_GUARDED_BY(mutex_) = 0;        ///< how often all ranks have said that they cannot go on
  std::thread thread_;                              // last: it uses all the others
};

}  // namespace lockstep::fully_sharded
