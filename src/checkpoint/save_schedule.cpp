#include "checkpoint/save_schedule.h"

#include <algorithm>

#include "checkpoint/checkpoint_message.h"

namespace lockstep {
namespace {

constexpr double kMaxSecondsBetweenQuestions = 1;
constexpr int64_t kMaxStepsBetweenQuestions = 1000;

double seconds_of(Clock::duration time) { return std::chrono::duration<double>(time).count(); }

}  // namespace

bool SaveSchedule::is_due(int64_t step) {
  if (options_.every_steps && step - last_step_ >= *options_.every_steps) return true;
  if (!options_.every_minutes || step < next_question_) return false;
  CheckpointMessage answer;
  if (group_.rank() == 0) {
    const auto now = Clock::now();
    const bool due = seconds_of(now - last_save_) >= *options_.every_minutes * 60;
    answer.outcome = due ? CheckpointMessage::Outcome::kDone : CheckpointMessage::Outcome::kNothing;
    answer.steps = steps_between_questions(step, now);
    last_question_ = now;
    last_asked_ = step;
  }
  answer = CheckpointMessage::decode(group_.broadcast_bytes(answer.encode()), 0);
  next_question_ = step + answer.steps;
  return answer.outcome == CheckpointMessage::Outcome::kDone;
}

int64_t SaveSchedule::steps_between_questions(int64_t step, Clock::time_point now) const {
  const double passed = seconds_of(now - last_question_);
  if (last_asked_ == 0 || passed <= 0) return 1;
  const double wanted = std::min(kMaxSecondsBetweenQuestions, *options_.every_minutes * 60 / 10);
  const auto steps = static_cast<double>(std::max<int64_t>(step - last_asked_, 1));
  return std::clamp<int64_t>(static_cast<int64_t>(wanted * steps / passed), 1, kMaxStepsBetweenQuestions);
}

void SaveSchedule::start_after(int64_t step) {
  last_step_ = step;
  last_save_ = Clock::now();
}

}  // namespace lockstep
