#include "rank_page/wait_on_page.h"

#include "base/thread_token.h"

namespace lockstep {

std::atomic<WaitOnPage::Thread*> WaitOnPage::first_thread{nullptr};

WaitOnPage::Thread& WaitOnPage::enter_thread() {
  const uint64_t number = thread_number();
  Thread* thread = first_thread.load(std::memory_order_acquire);  // from the exchange below, like all of the list
  for (; thread != nullptr; thread = thread->next) {
    uint64_t nobody = 0;
    if (thread->number.compare_exchange_strong(nobody, number)) break;
  }
  if (thread == nullptr) {
    thread = new Thread;
    thread->number.store(number, kRelaxed);
    thread->next = first_thread.load(kRelaxed);
    while (!first_thread.compare_exchange_weak(thread->next, thread, std::memory_order_release, kRelaxed)) {
    }
  }
  // At the end of the thread. A wait in a destructor that runs later would still be shown.
  static thread_local const struct Leaving {
    Thread* thread;
    ~Leaving() { thread->number.store(0, kRelaxed); }
  } leaving{thread};
  static_cast<void>(leaving);
  return *thread;
}

void WaitOnPage::show_any() {
  if (own_page().read(/*world_size=*/1).waiting) return;
  for (const Thread* thread = first_thread.load(std::memory_order_acquire); thread != nullptr; thread = thread->next) {
    if (thread->innermost.load(kRelaxed) == nullptr) continue;
    own_page().begin_wait(thread->group.load(kRelaxed), {.sequence = thread->sequence.load(kRelaxed),
                                                         .collective = thread->collective.load(kRelaxed),
                                                         .needs = thread->needs.load(kRelaxed),
                                                         .needs_some = thread->needs_some.load(kRelaxed)});
    std::atomic_thread_fence(std::memory_order_seq_cst);  // the wait may have ended before it was shown
    if (thread->innermost.load(kRelaxed) == nullptr) own_page().set_waiting(false);
    return;
  }
}

std::optional<uint64_t> WaitOnPage::only_waiting_thread() {
  std::optional<uint64_t> found;
  for (const Thread* thread = first_thread.load(std::memory_order_acquire); thread != nullptr; thread = thread->next) {
    if (thread->innermost.load(kRelaxed) == nullptr) continue;
    if (found) return std::nullopt;
    found = thread->number.load(kRelaxed);
  }
  return found;
}

}  // namespace lockstep
