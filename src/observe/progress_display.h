#pragma once

#include <optional>
#include <string>

#include <lockstep/progress.h>

#include "base/clock.h"
#include "base/environment.h"
#include "observe/progress_tracker.h"

namespace lockstep {

/// The destination of progress lines.
struct ProgressOutput {
  int fd = 2;
  /// Columns of the terminal that shows the bytes; empty: no terminal.
  std::optional<int> columns;

  /// stderr: a terminal, or a pipe to the launcher, which forwards it to one.
  static ProgressOutput standard_error(const Environment& environment);
};

/// Draws the state of a tracker, not too often.
///
/// On a terminal each drawing is one write of "\r", the text and "erase to the end of the line", without a line feed
/// until the end, so that the next drawing overwrites it and the text before a crash stays readable.
class ProgressDisplay {
 public:
  ProgressDisplay(ProgressLine::Pass pass, ProgressOutput output, Clock::time_point now);
  ~ProgressDisplay();

  /// Draws if it is time.
  void step(int64_t samples, Clock::time_point now);
  void finish(Clock::time_point now);
  ProgressTracker& tracker() { return tracker_; }

 private:
  void draw(const ProgressState& state, bool last);

  const ProgressOutput output_;
  const Clock::duration interval_;
  ProgressTracker tracker_;
  Clock::time_point next_;
  bool finished_ = false;
};

}  // namespace lockstep
