#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace lockstep::shm {

class Communicator;

/// The groups of one rank. A thread that waits in one of them also makes progress in the others, so that ranks may wait
/// for operations of several groups in different orders.
class ProgressSet {
 public:
  /// The set of this process, for when every rank is a process.
  static const std::shared_ptr<ProgressSet>& process();

  void add(Communicator* group);
  void remove(Communicator* group);
  bool has_several() const { return count_.load(std::memory_order_relaxed) > 1; }
  /// Makes progress in all groups but `self`, without waiting. True if something is still pending in one of them.
  bool progress_others(const Communicator* self);

 private:
  std::atomic<size_t> count_{0};
  Mutex mutex_;
  std::vector<Communicator*> groups_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm
