#pragma once

#include "rank_page/rank_board.h"

namespace lockstep {

/// Tells the launcher that this rank waits and does not compute, even while it spins.
struct WaitOnPage {
  WaitOnPage(int group, const RankStatus::Awaited& awaited) { own_page().begin_wait(group, awaited); }
  ~WaitOnPage() { own_page().set_waiting(false); }
  WaitOnPage(const WaitOnPage&) = delete;
};

}  // namespace lockstep
