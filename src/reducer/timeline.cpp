#include "reducer/timeline.h"

#include <algorithm>
#include <string>

#include <ATen/ATen.h>

#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

double milliseconds(Clock::duration time) { return std::chrono::duration<double, std::milli>(time).count(); }

int64_t nanoseconds(Clock::time_point time) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(time.time_since_epoch()).count();
}

}  // namespace

void Timeline::begin(size_t buckets) {
  const MutexLock lock(mutex_);
  reduction_.begin = Clock::now();
  reduction_.buckets.assign(buckets, {});
}

void Timeline::ready(size_t bucket) {
  const MutexLock lock(mutex_);
  reduction_.buckets[bucket].ready = Clock::now();
}

void Timeline::sent(size_t bucket) {
  const MutexLock lock(mutex_);
  reduction_.buckets[bucket].start = Clock::now();
}

void Timeline::waits() {
  const MutexLock lock(mutex_);
  reduction_.last = reduction_.waits_since = Clock::now();
}

void Timeline::done(size_t bucket) {
  const MutexLock lock(mutex_);
  Times& times = reduction_.buckets[bucket];
  times.end = Clock::now();
  times.wait_ms = milliseconds(times.end - reduction_.last);
  reduction_.last = times.end;
}

void Timeline::set_rank_comparison(bool on) {
  const MutexLock lock(mutex_);
  compares_ = on;
}

void Timeline::set_observer(std::shared_ptr<Observer> observer) {
  const MutexLock lock(mutex_);
  observer_ = std::move(observer);
}

void Timeline::end(const Group& group) {
  Reduction reduction;
  std::shared_ptr<Observer> observer;
  bool compares = false;
  {
    const MutexLock lock(mutex_);
    if (reduction_.buckets.empty()) return;
    ++reduction_.number;
    sums_.backward_ms += milliseconds(reduction_.last - reduction_.begin);
    sums_.wait_ms += milliseconds(reduction_.last - reduction_.waits_since);
    sums_.under_way_ms += milliseconds(reduction_.last - reduction_.buckets.front().start);
    observer = observer_;
    compares = compares_;
    if (observer || compares) reduction = reduction_;
  }
  if (compares) compare(group, reduction);
  if (observer) tell(*observer, reduction);
}

void Timeline::compare(const Group& group, const Reduction& reduction) {
  const auto ranks = static_cast<size_t>(group.world_size());
  const OperationLabel label("the comparison of the ranks' times");
  const double waited_ms = milliseconds(reduction.last - reduction.waits_since);
  const at::Tensor all = group.all_gather(at::scalar_tensor(waited_ms, at::kDouble));
  const double* waits = all.const_data_ptr<double>();
  const MutexLock lock(mutex_);
  sums_.wait_ms_by_rank.resize(ranks);
  sums_.times_last_by_rank.resize(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) sums_.wait_ms_by_rank[rank] += waits[rank];
  ++sums_.times_last_by_rank[static_cast<size_t>(std::min_element(waits, waits + ranks) - waits)];
  ++sums_.compared;
  sums_.compared_ms += milliseconds(reduction.last - reduction.begin);
}

void Timeline::tell(Observer& observer, const Reduction& reduction) {
  const auto span = [&](std::string name, std::string lane, Clock::time_point begin, Clock::time_point end,
                        std::vector<std::pair<std::string, std::string>> facts) {
    observer.span({std::move(name), std::move(lane), nanoseconds(begin), nanoseconds(end), std::move(facts)});
  };
  const std::string number = std::to_string(reduction.number);
  span("backward", "backward", reduction.begin, reduction.waits_since, {{"reduction", number}});
  span("wait", "backward", reduction.waits_since, reduction.last, {{"reduction", number}});
  for (size_t b = 0; b < reduction.buckets.size(); ++b) {
    const Times& times = reduction.buckets[b];
    const std::string name = "bucket " + std::to_string(b + 1);
    span(name, name, times.start, times.end, {{"reduction", number}, {"wait_ms", std::to_string(times.wait_ms)}});
  }
}

ReductionStats Timeline::stats() const {
  const MutexLock lock(mutex_);
  ReductionStats stats;
  stats.reductions = reduction_.number;
  for (const Times& times : reduction_.buckets)
    stats.buckets.push_back({.parameters = {},
                             .bytes = 0,
                             .ready_ms = milliseconds(times.ready.value_or(times.start) - reduction_.begin),
                             .start_ms = milliseconds(times.start - reduction_.begin),
                             .end_ms = milliseconds(times.end - reduction_.begin),
                             .wait_ms = times.wait_ms});
  if (reduction_.number == 0) return stats;
  const auto count = static_cast<double>(reduction_.number);
  stats.backward_ms = sums_.backward_ms / count;
  stats.wait_ms = sums_.wait_ms / count;
  stats.overlap = sums_.under_way_ms > 0 ? std::clamp(1 - sums_.wait_ms / sums_.under_way_ms, 0.0, 1.0) : 0;
  if (sums_.compared == 0) return stats;
  stats.times_last_by_rank = sums_.times_last_by_rank;
  for (const double wait : sums_.wait_ms_by_rank)
    stats.wait_ms_by_rank.push_back(wait / static_cast<double>(sums_.compared));
  stats.reason = reason(sums_, stats.wait_ms_by_rank);
  return stats;
}

std::string Timeline::reason(const Sums& sums, const std::vector<double>& wait_ms_by_rank) {
  const auto& times_last = sums.times_last_by_rank;
  const auto latest = std::max_element(times_last.begin(), times_last.end());
  const auto rank = static_cast<size_t>(latest - times_last.begin());
  const double others_wait = *std::max_element(wait_ms_by_rank.begin(), wait_ms_by_rank.end());
  const double noticeable_ms = 0.01 * sums.compared_ms / static_cast<double>(sums.compared);
  if (*latest * 2 <= sums.compared || others_wait - wait_ms_by_rank[rank] <= noticeable_ms) return "";
  return "rank " + std::to_string(rank) + " came last in " + std::to_string(*latest) + " of " +
         std::to_string(sums.compared) + " reductions; others waited up to " + std::to_string(others_wait) +
         " ms a reduction, it waited " + std::to_string(wait_ms_by_rank[rank]) + " ms";
}

}  // namespace lockstep
