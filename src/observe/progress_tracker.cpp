#include "observe/progress_tracker.h"

#include <algorithm>
#include <utility>

namespace lockstep {

namespace {
double seconds_between(Clock::time_point from, Clock::time_point to) {
  return std::chrono::duration<double>(to - from).count();
}
}  // namespace

ProgressTracker::ProgressTracker(ProgressLine::Pass pass, Clock::time_point start)
    : pass_(std::move(pass)), start_(start), marks_{mark(start)} {}

void ProgressTracker::communication(double total_seconds, Clock::time_point now) {
  communication_seconds_ = total_seconds;
  if (!communication_start_) communication_start_ = mark(now);
}

ProgressState ProgressTracker::state(Clock::time_point now) {
  while (marks_.size() > 1 && now - marks_[1].at >= kWindow) marks_.pop_front();
  ProgressState state = counts();
  const Mark& from = marks_.front();
  add_rates(state, from, mark(now));
  if (batches_ > from.batches)
    state.seconds_left = static_cast<double>(pass_.steps - pass_.first_step - batches_) *
                         seconds_between(from.at, now) / static_cast<double>(batches_ - from.batches);
  marks_.push_back(mark(now));
  return state;
}

ProgressState ProgressTracker::final_state(Clock::time_point now) const {
  ProgressState state = counts();
  add_rates(state, {start_, 0, 0, 0}, mark(now));
  state.seconds_taken = seconds_between(start_, now);
  return state;
}

ProgressState ProgressTracker::counts() const {
  const int64_t done = pass_.first_step + batches_, in_a_step = std::max<int64_t>(pass_.batches_per_step, 1);
  const int64_t steps = (pass_.steps + in_a_step - 1) / in_a_step;
  return {.label = pass_.label,
          .epoch = pass_.epoch,
          .epochs = pass_.epochs,
          .step = done == pass_.steps ? steps : done / in_a_step,
          .steps = steps,
          .loss = loss_,
          .samples_per_second = {},
          .communication_share = {},
          .seconds_left = {},
          .seconds_taken = {}};
}

void ProgressTracker::add_rates(ProgressState& state, const Mark& from, const Mark& to) const {
  const double seconds = seconds_between(from.at, to.at);
  const double share = pass_.share > 0 ? pass_.share : 1.0 / pass_.world_size;
  if (seconds > 0 && to.batches > from.batches)
    state.samples_per_second = static_cast<double>(to.samples - from.samples) / share / seconds;
  if (!communication_start_) return;
  // The total has no meaning before its first report.
  const Mark& since = from.at < communication_start_->at ? *communication_start_ : from;
  const double share_seconds = seconds_between(since.at, to.at);
  if (share_seconds > 0)
    state.communication_share = (to.communication_seconds - since.communication_seconds) / share_seconds;
}

}  // namespace lockstep
