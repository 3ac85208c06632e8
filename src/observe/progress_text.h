#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace lockstep {

/// The contents of a progress line at one moment of a pass.
struct ProgressState {
  std::string label;  ///< instead of the epoch
  int epoch = 0;      ///< counts from 0
  int epochs = 0;     ///< 0: unknown
  int64_t step = 0;
  int64_t steps = 0;
  std::optional<double> loss;
  std::optional<double> samples_per_second;
  std::optional<double> communication_share;  ///< of the time, 0 .. 1
  std::optional<double> seconds_left;
  std::optional<double> seconds_taken;  ///< shown instead of the time left
};

/// "epoch 2/5  step 180/468  loss 0.3412  14,210 samples/s  comm 7 %  ETA 0:42", in at most `columns` characters.
/// Fields that do not fit are left out, first the share of communication, then rate, time, loss and label; the rest is
/// cut.
std::string progress_text(const ProgressState& state, int columns);

/// "1,234,567": digits in groups of three; rounded.
std::string with_thousands(double value);

/// "0:42", "12:05", "3:07:09"; rounded up to whole seconds.
std::string minutes_and_seconds(double seconds);

}  // namespace lockstep
