#pragma once

#include <atomic>
#include <cstdint>
#include <optional>

#include "rank_page/rank_board.h"

namespace lockstep {

/// Shows on this rank's page that a thread waits and does not compute, even while it spins. The page has room for the
/// wait of one thread: if another thread's operation ends meanwhile, a thread that still waits shows its wait again
/// when it next looks (show_again()), or has another thread do so (show_any()).
class WaitOnPage {
 public:
  WaitOnPage(int group, const RankStatus::Awaited& awaited)
      : group_(group), awaited_(awaited), thread_(this_thread()), outer_(thread_.innermost.load(kRelaxed)) {
    thread_.show(this);
    own_page().begin_wait(group_, awaited_);
  }
  ~WaitOnPage() {
    thread_.show(outer_);
    own_page().set_waiting(false);
  }
  WaitOnPage(const WaitOnPage&) = delete;
  WaitOnPage& operator=(const WaitOnPage&) = delete;

  /// Shows the calling thread's wait, if it has one. Called by threads that have waited for long, before each sleep.
  static void show_again() {
    const WaitOnPage* const own = this_thread().innermost.load(kRelaxed);
    if (own != nullptr) own_page().begin_wait(own->group_, own->awaited_);
  }
  /// If the page shows none, shows the wait of some thread that cannot do so itself. Any thread may call.
  static void show_any();
  /// The one thread that waits now, by thread_number(). None: none waits, or several do.
  static std::optional<uint64_t> only_waiting_thread();

 private:
  static constexpr auto kRelaxed = std::memory_order_relaxed;
  /// Never freed, but used again by another thread after this one has ended, so it can be read and written at any time.
  struct Thread {
    std::atomic<const WaitOnPage*> innermost{nullptr};
    std::atomic<uint64_t> number{0};  ///< 0: of no thread now
    // Of the innermost wait. Another thread may read a mixture of two.
    std::atomic<int> group{RankPage::kNoGroup};
    std::atomic<uint64_t> sequence{0}, collective{0}, needs{0};
    std::atomic<bool> needs_some{false};
    Thread* next = nullptr;

    void show(const WaitOnPage* wait) {
      if (wait != nullptr) {
        group.store(wait->group_, kRelaxed);
        sequence.store(wait->awaited_.sequence, kRelaxed);
        collective.store(wait->awaited_.collective, kRelaxed);
        needs.store(wait->awaited_.needs, kRelaxed);
        needs_some.store(wait->awaited_.needs_some, kRelaxed);
      }
      innermost.store(wait, kRelaxed);
    }
  };
  static Thread& this_thread() {
    if (own_thread == nullptr) own_thread = &enter_thread();
    return *own_thread;
  }
  static Thread& enter_thread();

  static inline thread_local Thread* own_thread = nullptr;
  static std::atomic<Thread*> first_thread;  ///< of all

  const int group_;
  const RankStatus::Awaited awaited_;
  Thread& thread_;
  const WaitOnPage* const outer_;
};

}  // namespace lockstep
