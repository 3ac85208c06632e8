#pragma once

#include <cstdint>

#include "rank_page/rank_board.h"

namespace lockstep {

/// Lets the ranks of one board agree, without communication, on the step after which all of them stop.
///
/// Each rank calls should_stop() equally often, say once a step, and numbers its calls from 1. The launcher, or a
/// signal handler of any rank, sets `stop_asked`. All ranks then get their first `true` from the call with the same
/// number, which is at most one past the last call of the rank that is furthest ahead.
///
/// Proof: a call first writes its number and then reads `stop_asked`, both sequentially consistent. So a call that
/// finds it unset has written its number before it was set, and the decision, made after it was set, sees that number.
/// The decision is the highest number seen plus one. It is made once, by compare and swap, in the first call that finds
/// `stop_asked` set. So every call with a lower number returns false, and no call from that number on can have missed
/// it.
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
