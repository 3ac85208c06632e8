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
  begin_ = Clock::now();
  buckets_.assign(buckets, {});
}

void Timeline::launched(size_t bucket) { buckets_[bucket].start = Clock::now(); }

void Timeline::done(size_t bucket) {
  Times& times = buckets_[bucket];
  times.end = Clock::now();
  times.wait_ms = milliseconds(times.end - last_);
  last_ = times.end;
}

void Timeline::end(const Group& group) {
  if (buckets_.empty()) return;
  ++reductions_;
  const double waited_ms = milliseconds(last_ - waits_since_);
  backward_ms_ += milliseconds(last_ - begin_);
  wait_ms_ += waited_ms;
  under_way_ms_ += milliseconds(last_ - buckets_.front().start);
  if (compares_) compare(group, waited_ms);
  if (observer_) tell_observer();
}

void Timeline::compare(const Group& group, double waited_ms) {
  const auto ranks = static_cast<size_t>(group.world_size());
  const OperationLabel label("the comparison of the ranks' times");
  const at::Tensor all = group.all_gather(at::scalar_tensor(waited_ms, at::kDouble));
  const double* waits = all.const_data_ptr<double>();
  wait_ms_by_rank_.resize(ranks);
  times_last_by_rank_.resize(ranks);
  for (size_t rank = 0; rank < ranks; ++rank) wait_ms_by_rank_[rank] += waits[rank];
  ++times_last_by_rank_[static_cast<size_t>(std::min_element(waits, waits + ranks) - waits)];
  ++compared_;
  compared_ms_ += milliseconds(last_ - begin_);
}

void Timeline::tell_observer() const {
  const auto tell = [&](std::string name, std::string lane, Clock::time_point begin, Clock::time_point end,
                        std::vector<std::pair<std::string, std::string>> facts) {
    observer_->span({std::move(name), std::move(lane), nanoseconds(begin), nanoseconds(end), std::move(facts)});
  };
  const std::string reduction = std::to_string(reductions_);
  tell("backward", "backward", begin_, waits_since_, {{"reduction", reduction}});
  tell("wait", "backward", waits_since_, last_, {{"reduction", reduction}});
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const std::string name = "bucket " + std::to_string(b + 1);
    tell(name, name, buckets_[b].start, buckets_[b].end,
         {{"reduction", reduction}, {"wait_ms", std::to_string(buckets_[b].wait_ms)}});
  }
}

ReductionStats Timeline::stats() const {
  ReductionStats stats;
  stats.reductions = reductions_;
  for (const Times& times : buckets_)
    stats.buckets.push_back({.parameters = {},
                             .bytes = 0,
                             .ready_ms = milliseconds(times.ready.value_or(times.start) - begin_),
                             .start_ms = milliseconds(times.start - begin_),
                             .end_ms = milliseconds(times.end - begin_),
                             .wait_ms = times.wait_ms});
  if (reductions_ == 0) return stats;
  const auto count = static_cast<double>(reductions_);
  stats.backward_ms = backward_ms_ / count;
  stats.wait_ms = wait_ms_ / count;
  stats.overlap = under_way_ms_ > 0 ? std::clamp(1 - wait_ms_ / under_way_ms_, 0.0, 1.0) : 0;
  if (compared_ == 0) return stats;
  stats.times_last_by_rank = times_last_by_rank_;
  for (const double wait : wait_ms_by_rank_) stats.wait_ms_by_rank.push_back(wait / static_cast<double>(compared_));
  const auto latest = std::max_element(times_last_by_rank_.begin(), times_last_by_rank_.end());
  const double others_wait = *std::max_element(stats.wait_ms_by_rank.begin(), stats.wait_ms_by_rank.end());
  const auto rank = static_cast<size_t>(latest - times_last_by_rank_.begin());
  if (*latest * 2 > compared_ &&
      others_wait - stats.wait_ms_by_rank[rank] > 0.01 * compared_ms_ / static_cast<double>(compared_))
    stats.reason = "rank " + std::to_string(rank) + " came last in " + std::to_string(*latest) + " of " +
                   std::to_string(compared_) + " reductions; others waited up to " + std::to_string(others_wait) +
                   " ms a reduction, it waited " + std::to_string(stats.wait_ms_by_rank[rank]) + " ms";
  return stats;
}

}  // namespace lockstep
