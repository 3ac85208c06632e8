#pragma once

#include "rank_page/rank_board.h"

namespace lockstep {

/// Shows on this rank's page that a thread waits and does not compute, even while it spins. The page has room for the
/// wait of one thread: if another thread's operation ends meanwhile, a thread that still waits shows its wait again
/// when it next looks (show_again()).
class WaitOnPage {
 public:
  WaitOnPage(int group, const RankStatus::Awaited& awaited) : group_(group), awaited_(awaited), outer_(innermost) {
    innermost = this;
    own_page().begin_wait(group_, awaited_);
  }
  ~WaitOnPage() {
    innermost = outer_;
    own_page().set_waiting(false);
  }
  WaitOnPage(const WaitOnPage&) = delete;
  WaitOnPage& operator=(const WaitOnPage&) = delete;

  /// Shows the calling thread's wait, if it has one. Called by threads that have waited for long, before each sleep.
  static void show_again() {
    if (innermost != nullptr) own_page().begin_wait(innermost->group_, innermost->awaited_);
  }

 private:
  static inline thread_local const WaitOnPage* innermost = nullptr;  ///< of this thread

  const int group_;
  const RankStatus::Awaited awaited_;
  const WaitOnPage* const outer_;
};

}  // namespace lockstep
