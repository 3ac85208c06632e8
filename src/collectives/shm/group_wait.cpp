#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "base/error.h"
#include "base/interruption.h"
#include "collectives/shm/futex.h"
#include "collectives/shm/group.h"
#include "rank_page/rank_board.h"

// Waiting: the only place where a thread sleeps, and where it notices that other ranks have ended.

namespace lockstep::shm {
namespace {

/// A peer that arrives at the same time answers within these polls (0.1 us). What is done between later polls would
/// take as long again.
constexpr unsigned kFastPolls = 16;
constexpr std::chrono::microseconds kSleepWithOthers{500};  ///< while other groups of this rank have work pending

/// A verdict names what the thread waits for, and if that is not known the operation at hand.
void tell_where(Verdict& verdict, const Work* waited, uint64_t at_hand) {
  const auto* message = dynamic_cast<const Message*>(waited);
  if (message == nullptr) {
    verdict.sequence = at_hand;
    return;
  }
  verdict.message = message->described();
  verdict.message_tag = static_cast<uint64_t>(message->tag());
}

}  // namespace

void Group::wait(Work& work, std::chrono::milliseconds timeout) {
  if (!work.done()) {
    check_process();
    const Lock guard(*this);
    wait_locked(work, timeout);
  }
  if (work.failed()) throw Error(work.error());
}

void Group::wait_locked(const Work& work, std::chrono::milliseconds timeout) {
  WaitPolicy policy(world_.spin(), timeout);
  uint64_t moved = rounds_moved_;
  for (unsigned polls = 0;; ++polls) {
    progress_locked();
    if (work.done()) {
      if (stuck_search_.is_published()) stuck_search_.withdraw();
      return;
    }
    if (polls < kFastPolls) continue;
    if (moved != rounds_moved_) {
      moved = rounds_moved_;
      policy.reset();
    }
    const bool needed = contenders_.load(std::memory_order_relaxed) != 0 || processor_is_needed();
    const auto step = policy.next(needed);
    if (step == WaitPolicy::Step::kSleep) {
      if (const auto left = policy.remaining(); left > std::chrono::microseconds::zero())
        sleep(work, left);
      else
        time_out(work, policy);
      if (policy.should_check_peers() && !work.done()) {
        stop_if_interrupted();
        find_departed_peers(&work);
      }
      continue;
    }
    if (step == WaitPolicy::Step::kSpin) {
      cpu_pause();
      continue;
    }
    set_->progress_others(this);
    mutex_.unlock();
    ::sched_yield();
    mutex_.lock();
  }
}

bool Group::processor_is_needed() {
  const auto here = static_cast<uint32_t>(::sched_getcpu());  // -1, which is kNoProcessor, if it fails
  world_.note_processor(here);
  return world_.waits_on(here, blocked_on_ | blocked_on_any_);
}

void Group::poll(const Work& work, std::chrono::microseconds at_most) {
  check_process();
  const Lock guard(*this);
  progress_locked();
  if (work.done()) return;
  sleep(work, at_most);
  if (!work.done()) find_departed_peers(nullptr);
}

void Group::sleep(const Work& work, std::chrono::microseconds at_most) {
  Control& mine = world_.mine();
  own_page().set_waits_for(world_.launched_ranks(blocked_on_ | blocked_on_any_));
  const uint32_t bell = mine.bell.load();
  mine.awaited.fetch_or(blocked_on_ | blocked_on_any_, std::memory_order_seq_cst);
  // The loads that follow only acquire, which a weak processor may do before the store above is seen. With this fence
  // either they see a peer's word, or that peer sees `awaited`, which notify() loads (seq_cst) after it stored the
  // word.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  progress_locked();  // it may have come before anybody saw that this rank is about to sleep
  if (!work.done()) {
    const bool others = set_->progress_others(this);
    ++sleepers_;
    mutex_.unlock();
    futex_wait(mine.bell, bell, std::min(at_most, others ? kSleepWithOthers : WaitPolicy::kLongestSleep));
    mutex_.lock();
    --sleepers_;
  }
  if (sleepers_ == 0) mine.awaited.store(0);  // a hint: no order is needed
}

void Group::wake_own_sleepers() {
  if (sleepers_ == 0) return;
  world_.mine().bell.fetch_add(1);
  futex_wake_all(world_.mine().bell);
}

void Group::find_departed_peers(const Work* waited) {
  progress_locked();
  const auto first_gone = [&](uint64_t ranks) {
    for (; ranks != 0; ranks &= ranks - 1)
      if (const int r = std::countr_zero(ranks);
          world_.watch(r).gone() ||
          world_.control(r).closed.load(std::memory_order_acquire) != 0)  // from leave(): all that it published before
        return r;
    return -1;
  };
  int culprit = first_gone(blocked_on_);
  if (culprit < 0 && blocked_on_any_ != 0) {
    // Any sender would do, so it only counts if all of them are gone.
    uint64_t left = blocked_on_any_;
    while (left != 0 && first_gone(left) >= 0) left &= ~world_.bit(first_gone(left));
    if (left == 0) culprit = first_gone(blocked_on_any_);
  }
  if (culprit < 0) {
    if (waited != nullptr && !waited->done()) find_stuck_ranks(*waited);
    return;
  }
  // What the peer published before it ended still counts.
  progress_locked();
  if (((blocked_on_ | blocked_on_any_) & world_.bit(culprit)) == 0) return;
  const bool left = world_.control(culprit).closed.load(std::memory_order_acquire) != 0;
  Verdict verdict{left ? Verdict::Cause::kLeft : Verdict::Cause::kDied, rank(), culprit};
  tell_where(verdict, waited, queue_.empty() ? 0 : queue_.front()->sequence);
  if (verdict.message != 0 && !Verdict::exists(world_)) {
    const std::string tags = channels_.unwanted_tags(culprit);
    char* const place = world_.mine().abort_text;
    place[tags.copy(place, sizeof world_.mine().abort_text - 1)] = '\0';
  }
  verdict.declare(world_);
  progress_locked();
}

void Group::stop_if_interrupted() {
  if (!can_be_interrupted()) return;
  std::exception_ptr interruption;
  mutex_.unlock();  // a handler of the program may use the group
  try {
    check_for_interruption();
  } catch (...) {
    interruption = std::current_exception();
  }
  mutex_.lock();
  if (!interruption) return;
  abort_locked("it was interrupted (SIGINT, Ctrl-C) while it waited for other ranks");
  std::rethrow_exception(interruption);
}

void Group::find_stuck_ranks(const Work& waited) {
  stuck_search_.note_caller();
  if (stuck_search_.has_several_callers() || Verdict::exists(world_)) return;
  Waiting waiting{.started = started_, .sends_to = channels_.sends_to(), .receives_of = channels_.receives_of()};
  if (const auto* message = dynamic_cast<const Message*>(&waited)) {
    waiting.kind = message->is_send() ? Waiting::Kind::kSend : Waiting::Kind::kReceive;
    waiting.peer = message->peer();
    waiting.tag = message->tag();
    if (const auto tag = message->is_send() ? std::nullopt : channels_.unwanted_tag(message->peer())) {
      waiting.has_other = true;
      waiting.other_tag = *tag;
    }
  } else {
    waiting.kind = Waiting::Kind::kCollective;
    waiting.operation = static_cast<const Operation&>(waited).sequence;
  }
  stuck_search_.publish(waiting);
  if (!stuck_search_.finds_ranks()) return;
  progress_locked();  // it may have come since
  if (waited.done() || Verdict::exists(world_)) return;
  const std::string text = stuck_search_.text();
  char* const place = world_.mine().abort_text;
  place[text.copy(place, sizeof world_.mine().abort_text - 1)] = '\0';
  Verdict{Verdict::Cause::kStuck, rank(), stuck_search_.culprit()}.declare(world_);
  progress_locked();
}

void Group::time_out(const Work& waited, const WaitPolicy& policy) {
  Control& mine = world_.mine();
  std::snprintf(mine.abort_text, sizeof mine.abort_text, "timeout after %.1f s",
                static_cast<double>(policy.timeout().count()) / 1000);
  mine.missing.store(blocked_on_ | blocked_on_any_);  // both: released by declare(), acquired by exists()
  Verdict verdict{Verdict::Cause::kTimeout, rank(), rank()};
  tell_where(verdict, &waited, queue_.empty() ? 0 : queue_.front()->sequence);
  verdict.declare(world_);
  progress_locked();
}

}  // namespace lockstep::shm
