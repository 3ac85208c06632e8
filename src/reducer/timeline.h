#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <lockstep/group.h>
#include <lockstep/observer.h>
#include <lockstep/reduction_stats.h>

#include "base/clock.h"

namespace lockstep {

/// When things happened in reductions: a handful of clock readings for each bucket. Guarded by the reducer's mutex.
class Timeline {
 public:
  /// A backward, or a reduction without one, begins.
  void begin(size_t buckets);
  void ready(size_t bucket) { buckets_[bucket].ready = Clock::now(); }
  void launched(size_t bucket);
  /// From here on this rank stands still, first for bucket 0.
  void waits() { last_ = waits_since_ = Clock::now(); }
  void done(size_t bucket);
  /// All buckets are reduced. With set_rank_comparison() every rank tells the others how long it waited.
  void end(const Group& group);

  void set_rank_comparison(bool on) { compares_ = on; }
  void set_observer(std::shared_ptr<Observer> observer) { observer_ = std::move(observer); }
  /// Without names and bytes, which the timeline does not know.
  ReductionStats stats() const;

 private:
  struct Times {
    std::optional<Clock::time_point> ready;  ///< none: nothing came for it, or not all
    Clock::time_point start, end;
    double wait_ms = 0;
  };
  void tell_observer() const;
  void compare(const Group& group, double waited_ms);

  bool compares_ = false;
  std::shared_ptr<Observer> observer_;
  Clock::time_point begin_, waits_since_, last_;
  std::vector<Times> buckets_;
  // Sums over reductions.
  int64_t reductions_ = 0;
  double backward_ms_ = 0, wait_ms_ = 0, under_way_ms_ = 0;
  // The same, of those that were compared.
  int64_t compared_ = 0;
  double compared_ms_ = 0;
  std::vector<double> wait_ms_by_rank_;
  std::vector<int64_t> times_last_by_rank_;
};

}  // namespace lockstep
