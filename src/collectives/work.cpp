#include "collectives/work.h"

#include <functional>
#include <optional>
#include <sstream>

#include "base/interruption.h"
#include "collectives/cause.h"
#include "collectives/device_engine.h"
#include "collectives/group_state.h"
#include "collectives/timeout_hint.h"
#include "collectives/waited_message.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

namespace lockstep {
namespace {

std::string arguments_of(const Work::State& state) {
  if (state.message.empty()) return state.call.arguments();
  return std::string("(") + shm::name(state.call.type) + ", " + std::to_string(state.call.count) + " elements, " +
         state.message + ")";
}

std::string named(const Work::State& state) {
  return std::string(state.operation) + " #" + std::to_string(state.sequence) + ' ' + arguments_of(state) +
         " failed on rank " + std::to_string(state.group->rank) + " of " + std::to_string(state.group->world_size) +
         " after ";
}

}  // namespace

std::string describe_failure(const Work::State& state, const std::exception& cause) {
  // Our own engine has already reported which rank is gone or missing; no other engine can. If another engine fails
  // after the timeout, a rank is assumed missing; if it fails earlier, a peer is assumed to have ended.
  const auto timeout = own_page().collective_timeout();
  const bool is_late = timeout.count() > 0 && Clock::now() - state.started >= timeout;
  const std::string told = state.group->membership->told();
  const bool timed_out = is_late && state.group->blocking == nullptr && told.empty();
  const std::string why = told.empty() ? cause_of(cause) : told;
  state.group->has_thrown = true;
  abort_device_engine(*state.group);
  own_page().fail(timed_out ? RankFailure::kMissing : RankFailure::kPeer, -1, why);
  std::ostringstream text;
  text << named(state) << seconds_since(state.started) << " s: " << why << (timed_out ? timeout_hint : "")
       << state.group->on_page.names_of_ranks() << "\nIf another rank ended first, see its own message for the cause.";
  return text.str();
}

namespace {

using Phase = Work::State::Phase;

/// `pass` waits for the work of the engine, or orders the current stream after it.
void finish_work(Work::State& state, const std::function<void(c10d::Work&)>& pass) {
  if (state.phase == Phase::kFailed) throw Error(state.error);
  if (state.phase == Phase::kDone) return;
  own_page().note_caller();
  const WaitOnPage waiting(state.group->on_page.place(), state.awaited);
  std::optional<WaitedMessage> message;
  if (!state.message.empty()) message.emplace(*state.group, state.counted);
  try {
    if (state.device_call != 0) check_device_call(*state.group, state.device_call);
    if (state.work) pass(*state.work);
    if (state.finish) state.finish();
  } catch (const Interruption&) {
    throw;
  } catch (const std::exception& cause) {
    state.phase = Phase::kFailed;
    state.error = describe_failure(state, cause);
    throw Error(state.error);
  }
  state.phase = Phase::kDone;
  state.counted.note_done();
  own_page().finish_operation(state.sequence);
  state.finish = nullptr;  // releases the tensors
}

}  // namespace

void Work::wait() const {
  finish_work(*state_, [](c10d::Work& work) { work.wait(); });
}

void order_after(const Work& work) {
  Work::State& state = Work::State::of(work);
  if (state.device_call == 0) return work.wait();
  finish_work(state, [](c10d::Work& one) { one.synchronize(); });
  const auto timeout = own_page().collective_timeout();
  state.group->device_works.add({.work = state.work,
                                 .deadline = timeout.count() > 0 ? state.started + timeout : Clock::time_point::max(),
                                 .describe = [head = named(state), started = state.started](const std::string& cause) {
                                   std::ostringstream text;
                                   text << head << seconds_since(started) << " s: " << cause
                                        << "\nIf another rank ended first, see its own message for the cause.";
                                   return text.str();
                                 }});
}

bool Work::is_completed() const {
  if (state_->phase == State::Phase::kRunning && state_->work) {
    if (!state_->work->isCompleted() || !state_->group->device_calls.has_arrived(state_->device_call)) return false;
    // A wait would order the present stream after it, which need not be the stream that uses the result.
    if (state_->device_call != 0) return true;
  }
  wait();
  return true;
}

}  // namespace lockstep
