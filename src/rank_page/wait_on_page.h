#pragma once

#include "rank_page/rank_board.h"

namespace lockstep {

/// Tells the launcher that this rank waits and does not compute, even while it spins.
struct WaitOnPage {
  WaitOnPage() { own_page().set_waiting(true); }
  ~WaitOnPage() { own_page().set_waiting(false); }
  WaitOnPage(const WaitOnPage&) = delete;
};

}  // namespace lockstep
