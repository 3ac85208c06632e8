#include "collectives/work.h"

#include <sstream>

#include "base/rank_board.h"
#include "collectives/cause.h"
#include "collectives/group_state.h"

namespace lockstep {

std::string describe_failure(const Work::State& state, const std::exception& cause) {
  // Who is gone only our own engine can say, and has said; of another engine's failures most come from a peer's end.
  own_page().fail(RankFailure::kPeer, -1, cause_of(cause));
  std::ostringstream text;
  text << state.operation << " #" << state.sequence << " (" << c10::toString(state.dtype) << ", " << state.bytes
       << " bytes) failed on rank " << state.group->rank << " of " << state.group->world_size << " after "
       << seconds_since(state.started) << " s: " << cause_of(cause)
       << "\nIf another rank ended first, its own message says why.";
  return text.str();
}

void Work::wait() const {
  State& state = *state_;
  if (state.phase == State::Phase::kFailed) throw Error(state.error);
  if (state.phase == State::Phase::kDone) return;
  try {
    if (state.work) state.work->wait();
    if (state.finish) state.finish();
  } catch (const std::exception& cause) {
    state.phase = State::Phase::kFailed;
    state.error = describe_failure(state, cause);
    throw Error(state.error);
  }
  state.phase = State::Phase::kDone;
  own_page().finish_operation(state.sequence);
  state.finish = nullptr;  // lets go of the tensors
}

bool Work::is_completed() const {
  return state_->phase != State::Phase::kRunning || !state_->work || state_->work->isCompleted();
}

}  // namespace lockstep
