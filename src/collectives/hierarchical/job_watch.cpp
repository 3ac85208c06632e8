#include "collectives/hierarchical/job_watch.h"

#include <algorithm>

#include "base/interruption.h"

namespace lockstep::hierarchical_engine {

void JobWatch::begin(Clock::time_point now) {
  started_ = now;
  next_look_ = now + kFirstLook;
  can_ask_ = can_be_interrupted();
}

void JobWatch::ask_if_interrupted() const {
  if (can_ask_ && interruption_is_pending()) ask_();
}

bool JobWatch::begin_look(Clock::time_point now) {
  if (watching_ || now < next_look_) return false;
  watching_ = true;
  return true;
}

void JobWatch::end_look(Clock::time_point begun) {
  watching_ = false;
  // Looks after 0.4, 1.2, 3.6, ... seconds: the delay to the next look is twice the job's age.
  next_look_ = begun + std::clamp<Clock::duration>(2 * (begun - started_), kFirstLook, kLongestPause);
}

std::chrono::milliseconds JobWatch::pause(Clock::time_point now) const {
  using std::chrono::milliseconds;
  const auto pause = std::clamp(std::chrono::ceil<milliseconds>(next_look_ - now), milliseconds(1), kLongestPause);
  return can_ask_ ? std::min(pause, kUntilAsked) : pause;
}

}  // namespace lockstep::hierarchical_engine
