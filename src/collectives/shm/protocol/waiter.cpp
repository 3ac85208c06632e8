#include "collectives/shm/protocol/waiter.h"

#include <sched.h>

#include <algorithm>
#include <bit>
#include <cstdio>

#include "base/interruption.h"
#include "collectives/shm/protocol/verdict.h"
#include "rank_page/rank_board.h"
#include "rank_page/wait_on_page.h"

// Waiting: the only place where a thread sleeps, and where it notices that other ranks have ended.
//
// Sleeping: a rank sets `awaited` to the ranks it needs, looks once more, and sleeps on its own `bell`. Whoever
// publishes a word looks at the others' `awaited` afterwards. Both sides use sequentially consistent operations, so
// one of them sees the other; if a wake-up is lost all the same, a sleep ends after 10 ms.

namespace lockstep::shm {
namespace {

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

/// Ends the wait for a GroupsSearch, once it takes part.
struct SearchedWait {
  const Communicator& group;
  const Work& work;
  GroupsSearch* search = nullptr;
  ~SearchedWait() {
    if (search != nullptr) search->end(group, work);
  }
};

}  // namespace

void Waiter::wait(CountedMutex& mutex, const Work& work, WaitPolicy& policy) {
  // Rounds of collectives, and parts of messages.
  const auto moved_so_far = [&] { return engine_.pipeline().mover().rounds_moved() + engine_.channels().advances(); };
  uint64_t moved = moved_so_far();
  SearchedWait searched{communicator_, work};
  for (unsigned polls = 0;; ++polls) {
    engine_.advance();
    if (work.done()) {
      if (stuck_search_.is_published()) stuck_search_.withdraw();
      return;
    }
    if (polls < kFastPolls) continue;
    if (const uint64_t now = moved_so_far(); moved != now) {
      moved = now;
      policy.reset();
    }
    const bool needed = mutex.is_waited_for() || processor_is_needed(engine_.waits_for());
    const auto step = policy.next(needed);
    if (step == WaitPolicy::Step::kSleep) {
      if (const auto left = policy.remaining(); left > std::chrono::microseconds::zero())
        sleep(mutex, work, left);
      else
        time_out(work, policy);
      if (policy.should_check_peers() && !work.done()) {
        stop_if_interrupted(mutex);
        searched.search = groups_search_.get();
        find_departed_peers(&work);
      }
      continue;
    }
    if (step == WaitPolicy::Step::kSpin) {
      cpu_pause();
      continue;
    }
    set_.progress_others(&communicator_);
    mutex.unlock();
    ::sched_yield();
    mutex.lock_again();
  }
}

bool Waiter::processor_is_needed(uint64_t ranks) {
  const auto here = static_cast<uint32_t>(::sched_getcpu());  // -1, which is kNoProcessor, if it fails
  world_.note_processor(here);
  return world_.waits_on(here, ranks);
}

void Waiter::poll(CountedMutex& mutex, const Work& work, std::chrono::microseconds at_most) {
  engine_.advance();
  if (work.done()) return;
  sleep(mutex, work, at_most);
  if (!work.done()) find_departed_peers(nullptr);
}

void Waiter::sleep(CountedMutex& mutex, const Work& work, std::chrono::microseconds at_most) {
  Control& mine = world_.mine();
  WaitOnPage::show_again();
  own_page().set_waits_for(world_.numbers().launched_ranks(engine_.waits_for()));
  const uint32_t bell = mine.bell.load();
  mine.awaited.fetch_or(engine_.waits_for(), std::memory_order_seq_cst);
  // The loads that follow only acquire, which a weak processor may do before the store above is seen. With this fence
  // either they see a peer's word, or that peer sees `awaited`, which notify() loads (seq_cst) after it stored the
  // word.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  engine_.advance();  // it may have come before anybody saw that this rank is about to sleep
  if (!work.done()) {
    const bool others = set_.progress_others(&communicator_);
    engine_.sleepers().enter();
    mutex.unlock();
    futex_wait(mine.bell, bell, std::min(at_most, others ? kSleepWithOthers : WaitPolicy::kLongestSleep));
    mutex.lock_again();
    engine_.sleepers().leave();
  }
  if (engine_.sleepers().is_empty()) mine.awaited.store(0);  // a hint: no order is needed
}

void Waiter::find_departed_peers(const Work* waited) {
  engine_.advance();
  if (waited != nullptr && groups_search_ && !waited->done()) find_stuck_groups(*waited);
  const auto first_gone = [&](uint64_t ranks) {
    for (; ranks != 0; ranks &= ranks - 1)
      if (const int r = std::countr_zero(ranks);
          world_.watch(r).gone() ||
          world_.control(r).closed.load(std::memory_order_acquire) != 0)  // from leave(): all that it published before
        return r;
    return -1;
  };
  int culprit = first_gone(engine_.blocked_on());
  if (culprit < 0 && engine_.blocked_on_any() != 0) {
    // Any sender would do, so it only counts if all of them are gone.
    uint64_t left = engine_.blocked_on_any();
    while (left != 0 && first_gone(left) >= 0) left &= ~world_.bit(first_gone(left));
    if (left == 0) culprit = first_gone(engine_.blocked_on_any());
  }
  if (culprit < 0) {
    if (waited != nullptr && !waited->done()) find_stuck_ranks(*waited);
    return;
  }
  // Everything that the peer published before it ended still counts.
  engine_.advance();
  if ((engine_.waits_for() & world_.bit(culprit)) == 0) return;
  const bool left = world_.control(culprit).closed.load(std::memory_order_acquire) != 0;
  Verdict verdict{left ? Verdict::Cause::kLeft : Verdict::Cause::kDied, world_.rank(), culprit};
  tell_where(verdict, waited, engine_.pipeline().at_hand());
  if (verdict.message != 0 && !Verdict::exists(world_)) {
    const std::string tags = engine_.channels().unwanted_tags(culprit);
    char* const place = world_.mine().abort_text;
    place[tags.copy(place, sizeof world_.mine().abort_text - 1)] = '\0';
  }
  verdict.declare(world_);
  engine_.advance();
}

void Waiter::stop_if_interrupted(CountedMutex& mutex) {
  if (!can_be_interrupted()) return;
  std::exception_ptr interruption;
  mutex.unlock();  // a handler of the program may use the group
  try {
    check_for_interruption();
  } catch (...) {
    interruption = std::current_exception();
  }
  mutex.lock_again();
  if (!interruption) return;
  engine_.abort("it was interrupted (SIGINT, Ctrl-C) while it waited for other ranks");
  std::rethrow_exception(interruption);
}

Waiting Waiter::calls() {
  const Channels& channels = engine_.channels();
  return {
      .started = engine_.pipeline().started(), .sends_to = channels.sends_to(), .receives_of = channels.receives_of()};
}

Waiting Waiter::describe(const Work& waited) {
  Waiting waiting = calls();
  if (const auto* message = dynamic_cast<const Message*>(&waited)) {
    waiting.kind = message->is_send() ? Waiting::Kind::kSend : Waiting::Kind::kReceive;
    waiting.peer = message->peer();
    waiting.tag = message->tag();
    if (const auto tag = message->is_send() ? std::nullopt : engine_.channels().unwanted_tag(message->peer())) {
      waiting.has_other = true;
      waiting.other_tag = *tag;
    }
  } else {
    waiting.kind = Waiting::Kind::kCollective;
    waiting.operation = static_cast<const Operation&>(waited).sequence;
  }
  return waiting;
}

void Waiter::find_stuck_ranks(const Work& waited) {
  stuck_search_.note_caller();
  if (stuck_search_.has_several_callers() || Verdict::exists(world_)) return;
  stuck_search_.publish(describe(waited));
  if (!stuck_search_.finds_ranks()) return;
  engine_.advance();  // it may have come since
  if (waited.done() || Verdict::exists(world_)) return;
  end_stuck(Verdict::Cause::kStuck, stuck_search_.culprit(), stuck_search_.text());
}

void Waiter::find_stuck_groups(const Work& waited) {
  if (Verdict::exists(world_)) return;
  const auto found = groups_search_->look(communicator_, waited, describe(waited));
  if (found) end_stuck(Verdict::Cause::kStuckInGroups, found->culprit, found->text);
}

void Waiter::end_stuck(Verdict::Cause cause, int culprit, const std::string& text) {
  if (engine_.is_over()) return;  // a verdict must not change what an earlier one refers to
  char* const place = world_.mine().abort_text;
  place[text.copy(place, sizeof world_.mine().abort_text - 1)] = '\0';
  Verdict{cause, world_.rank(), culprit}.declare(world_);
  engine_.advance();
}

void Waiter::time_out(const Work& waited, const WaitPolicy& policy) {
  Control& mine = world_.mine();
  std::snprintf(mine.abort_text, sizeof mine.abort_text, "timeout after %.1f s",
                static_cast<double>(policy.timeout().count()) / 1000);
  mine.missing.store(engine_.waits_for());  // both: released by declare(), acquired by exists()
  Verdict verdict{Verdict::Cause::kTimeout, world_.rank(), world_.rank()};
  tell_where(verdict, &waited, engine_.pipeline().at_hand());
  verdict.declare(world_);
  engine_.advance();
}

}  // namespace lockstep::shm
