#pragma once

#include <cstdint>
#include <deque>
#include <optional>

#include <lockstep/progress.h>

#include "base/clock.h"
#include "observe/progress_text.h"

namespace lockstep {

/// Counts a pass and derives rate, share of communication and time left. Knows the time only from its arguments.
///
/// Rates cover the last few seconds: each `state` leaves a mark, and the oldest mark is dropped when the next one is at
/// least kWindow old. So rates follow changes without jitter, and the slow first step is soon forgotten.
class ProgressTracker {
 public:
  static constexpr Clock::duration kWindow = std::chrono::seconds(5);

  ProgressTracker(ProgressLine::Pass pass, Clock::time_point start);

  /// Called when a batch of this rank is done.
  void step(int64_t samples) {
    ++batches_;
    samples_ += samples;
  }
  void loss(double value) { loss_ = value; }
  void communication(double total_seconds, Clock::time_point now);

  int64_t batches() const { return batches_; }
  ProgressState state(Clock::time_point now);
  /// Averages of the whole pass.
  ProgressState final_state(Clock::time_point now) const;

 private:
  /// The position of the pass at one moment.
  struct Mark {
    Clock::time_point at;
    int64_t batches = 0;
    int64_t samples = 0;
    double communication_seconds = 0;
  };

  ProgressState counts() const;
  Mark mark(Clock::time_point now) const { return {now, batches_, samples_, communication_seconds_}; }
  void add_rates(ProgressState& state, const Mark& from, const Mark& to) const;

  const ProgressLine::Pass pass_;
  const Clock::time_point start_;
  int64_t batches_ = 0;
  int64_t samples_ = 0;
  std::optional<double> loss_;
  double communication_seconds_ = 0;
  std::optional<Mark> communication_start_;  // at the first call of communication()
  std::deque<Mark> marks_;
};

}  // namespace lockstep
