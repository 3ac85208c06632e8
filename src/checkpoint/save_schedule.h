#pragma once

#include <cstdint>

#include <lockstep/checkpointer.h>
#include <lockstep/group.h>

#include "base/clock.h"

namespace lockstep {

/// Decides when a save is due: by steps, or by rank 0's clock. The ranks' clocks differ, so all follow rank 0's, which
/// is asked so rarely that asking costs nothing.
class SaveSchedule {
 public:
  SaveSchedule(Group group, const CheckpointerOptions& options) : group_(std::move(group)), options_(options) {}

  /// REQUIRES: all ranks call it with the same steps.
  bool is_due(int64_t step);
  /// Called when the state of `step` was saved or resumed.
  void start_after(int64_t step);

 private:
  int64_t steps_between_questions(int64_t step, Clock::time_point now) const;

  const Group group_;
  const CheckpointerOptions options_;
  int64_t last_step_ = 0;
  Clock::time_point last_save_ = Clock::now();
  int64_t next_question_ = 0;  // the step of the next question to rank 0
  // On rank 0:
  int64_t last_asked_ = 0;  // the step of the last question
  Clock::time_point last_question_ = Clock::now();
};

}  // namespace lockstep
