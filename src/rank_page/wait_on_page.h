#pragma once

#include "rank_page/rank_board.h"

namespace lockstep {

/// Shows on this rank's page that a thread waits and does not compute, even while it spins. If several threads wait,
/// the page shows the wait that began last, and the rank counts as waiting until the last of them ends: a helper
/// thread's operation does not hide the wait of the main thread.
class WaitOnPage {
 public:
  WaitOnPage(int group, const RankStatus::Awaited& awaited);
  ~WaitOnPage();
  WaitOnPage(const WaitOnPage&) = delete;

 private:
  const int group_;
  const RankStatus::Awaited awaited_;
  WaitOnPage *earlier_, *later_ = nullptr;  ///< other threads' waits, linked under the list's mutex
};

}  // namespace lockstep
