#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <lockstep/group.h>

#include "base/clock.h"
#include "base/mutex.h"
#include "base/watching_thread.h"
#include "nn/exchange_records.h"

namespace lockstep {

/// Finds ranks that wait for each other because some of them run a synchronised batch norm and others do not. The
/// latter wait in another group, so no engine can detect the deadlock. A thread checks a few times a second whether
/// this rank waits. When the wait is long, the rank publishes its place through the store, and reads the others'
/// places. Nothing is sent while training progresses.
class ExchangeWatch {
 public:
  /// `group` is the exchanges' group. `around` is the engine of its parent group, in which the others may wait.
  ExchangeWatch(const Group& group, c10::intrusive_ptr<c10d::Backend> around);
  ExchangeWatch(const ExchangeWatch&) = delete;

  /// Called by the training thread before and after each exchange. `what`: "batch norm `features.1`"; `place`: "the
  /// forward of batch norm `features.1` of 8 channels".
  void enter(const std::string& what, const std::string& place);
  void leave();

  /// The finding for which the watch ended this rank's wait; empty if none.
  std::string verdict();
  /// Called after the ranks disagreed in an exchange. Returns the exchange of each rank, as far as ranks report it
  /// within a second; empty if no other does.
  std::string places();

 private:
  ExchangeRecord::Look look() const LOCKSTEP_REQUIRES(mutex_);
  ExchangeRecord record(const ExchangeRecord::Look& now) const LOCKSTEP_REQUIRES(mutex_);
  bool watch();
  void decide(const std::string& verdict);

  const Group group_;
  const c10::intrusive_ptr<c10d::Backend> around_;
  const ExchangeBoard board_;

  // Used by the thread.
  std::optional<ExchangeRecord::Look> last_;
  SaidByRanks before_;
  bool told_ = false;
  Clock::time_point since_ = Clock::now();

  Mutex mutex_;
  bool inside_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  uint64_t exchanges_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::string what_ LOCKSTEP_GUARDED_BY(mutex_), place_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string verdict_ LOCKSTEP_GUARDED_BY(mutex_);
  WatchingThread thread_;  // last: it uses all the others
};

}  // namespace lockstep
