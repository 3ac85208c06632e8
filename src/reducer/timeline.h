#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>
#include <lockstep/observer.h>
#include <lockstep/reduction_stats.h>

#include "base/clock.h"
#include "base/mutex.h"

namespace lockstep {

/// Timestamps of reductions: a few clock readings per bucket. Any thread may use it.
class Timeline {
 public:
  /// Begins a backward, or a reduction without one.
  void begin(size_t buckets);
  void ready(size_t bucket);
  void sent(size_t bucket);
  /// Marks this rank as idle from now on: it waits for the buckets, in order.
  void waits();
  void done(size_t bucket);
  /// Called when all buckets are reduced. With set_rank_comparison(), ranks exchange how long each has waited.
  void end(const Group& group);

  void set_rank_comparison(bool on);
  /// Whether someone looks at each reduction's times.
  bool is_watched() {
    const MutexLock lock(mutex_);
    return compares_ || observer_ != nullptr;
  }
  void set_observer(std::shared_ptr<Observer> observer);
  /// The statistics, except names and bytes, which the timeline does not know.
  ReductionStats stats() const;

 private:
  struct Times {
    std::optional<Clock::time_point> ready;  ///< none: some of its gradients never arrived
    Clock::time_point start, end;
    double wait_ms = 0;
  };
  /// One reduction: the last one, or the one in progress.
  struct Reduction {
    int64_t number = 0;  ///< of those that ended
    Clock::time_point begin, waits_since, last;
    std::vector<Times> buckets;
  };
  /// Sums over reductions.
  struct Sums {
    double backward_ms = 0, wait_ms = 0, under_way_ms = 0;
    // Sums over the reductions that were compared.
    int64_t compared = 0;
    double compared_ms = 0;
    std::vector<double> wait_ms_by_rank;
    std::vector<int64_t> times_last_by_rank;
  };
  static void tell(Observer& observer, const Reduction& reduction);
  void compare(const Group& group, const Reduction& reduction);
  static std::string reason(const Sums& sums, const std::vector<double>& wait_ms_by_rank);

  mutable Mutex mutex_;
  bool compares_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::shared_ptr<Observer> observer_ LOCKSTEP_GUARDED_BY(mutex_);
  Reduction reduction_ LOCKSTEP_GUARDED_BY(mutex_);
  Sums sums_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
