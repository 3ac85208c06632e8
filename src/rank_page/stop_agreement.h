#pragma once

#include <cstdint>

#include "rank_page/rank_board.h"

namespace lockstep {

/// How the ranks of one board agree on the step after which all of them stop, without talking to each other.
///
/// Each rank calls should_stop() equally often, say once a step, and numbers its calls from 1 on. Somebody - the
/// launcher, or a signal handler of any rank - sets `stop_asked`. All ranks then get their first `true` at the call of
/// the same number, which is no more than one past the furthest rank's last call.
///
/// Why it is the same number: a call first writes its number and then looks at `stop_asked`, both sequentially
/// consistent. A call that finds it unset has therefore written its number before it was set, and whoever decides,
/// which is after it was set, sees that number. The decision, the highest number seen plus one, is made once, by
/// compare and swap, by the first call that finds it set; so every call before it answers false, whenever it looked,
/// and no call from it on could have passed without seeing it.
class StopAgreement {
 public:
  StopAgreement(const RankBoard& board, RankPage& mine) : board_(board), mine_(mine) {}

  /// Safe in a signal handler, in any process that maps the board.
  static void ask(const RankBoard& board) { board.head().stop_asked.store(1); }

  /// Two stores and loads; never waits. One thread at a time.
  bool should_stop();

 private:
  uint64_t decide();

  const RankBoard& board_;
  RankPage& mine_;
};

}  // namespace lockstep
