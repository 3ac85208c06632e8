#include "collectives/shm/protocol/progress_set.h"

#include <pthread.h>

#include <algorithm>

#include "collectives/shm/protocol/communicator.h"

namespace lockstep::shm {

const std::shared_ptr<ProgressSet>& ProgressSet::process() {
  static auto* set = new std::shared_ptr<ProgressSet>(std::make_shared<ProgressSet>());
  // A child of fork() starts with a new set: the groups are not its own, and another thread may have held the mutex.
  static const int registered = ::pthread_atfork(
      nullptr, nullptr, [] { set = new std::shared_ptr<ProgressSet>(std::make_shared<ProgressSet>()); });
  (void)registered;
  return *set;
}

void ProgressSet::add(Communicator* group) {
  const MutexLock lock(mutex_);
  groups_.push_back(group);
  count_.store(groups_.size());
}

void ProgressSet::remove(Communicator* group) {
  const MutexLock lock(mutex_);
  groups_.erase(std::find(groups_.begin(), groups_.end(), group));
  count_.store(groups_.size());
}

bool ProgressSet::progress_others(const Communicator* self) {
  if (!has_several()) return false;
  // try_progress never waits for a group's mutex, so this cannot deadlock.
  const MutexLock lock(mutex_);
  bool pending = false;
  for (Communicator* group : groups_)
    if (group != self && group->try_progress()) pending = true;
  return pending;
}

}  // namespace lockstep::shm
