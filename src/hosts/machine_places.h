#pragma once

#include <vector>

namespace lockstep::hosts {

/// A machine's places for ranks in an elastic run.
struct MachinePlaces {
  int ranks = 0;        ///< in the last start
  int most = 0;         ///< places that it offers; 0: it is left out for good
  bool lost = false;    ///< its agent is gone
  bool leaves = false;  ///< if the next start has fewer ranks, one of its places is dropped first
};

/// The number of ranks on each machine in a start with `ranks` of them. A pure function.
///
/// - A lost machine has none if the others have enough places; otherwise its agent must be started again.
/// - Surplus places are dropped one by one, first one from each machine that leaves, then from the last machines.
/// - Missing places are taken from those that the first machines still offer. There may be fewer than `ranks` in all.
std::vector<int> share_out(std::vector<MachinePlaces> machines, int ranks);

}  // namespace lockstep::hosts
