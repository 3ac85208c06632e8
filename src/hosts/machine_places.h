#pragma once

#include <vector>

namespace lockstep::hosts {

/// The places for ranks that a machine of an elastic run has.
struct MachinePlaces {
  int ranks = 0;        ///< in the last start
  int most = 0;         ///< that it offers; 0: it is left out for good
  bool lost = false;    ///< its agent is gone
  bool leaves = false;  ///< if the next start has fewer ranks, one of its places goes first
};

/// How many ranks each machine has in a start with `ranks` of them. A pure function.
///
/// - A machine that is lost has none, if the others have places enough already; else its agent is to be started again.
/// - Places too many go one by one from machines that leave, a single one from each, then from the last machines.
/// - Places too few come from what the first machines still offer. There may be fewer than `ranks` of them in all.
std::vector<int> share_out(std::vector<MachinePlaces> machines, int ranks);

}  // namespace lockstep::hosts
