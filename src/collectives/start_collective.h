#pragma once

#include <cstdint>

#include "collectives/shm/protocol/request.h"
#include "rank_page/page_group.h"

namespace lockstep {

/// A collective of the group begins on this rank, number `rank` of it. Returns what the rank's page says while a thread
/// waits for it; `sequence` is the number that messages give it. `compares_all`: the engine compares the calls of all
/// ranks before it moves anything, as that in shared memory does.
inline RankStatus::Awaited start_collective(PageGroup& group, int rank, uint64_t sequence, const shm::Request& what,
                                            bool compares_all) {
  using Kind = shm::OperationKind;
  RankStatus::Awaited awaited{.sequence = sequence, .collective = group.start_collective()};
  if (compares_all) {
    awaited.needs = group.bits();
    return awaited;
  }
  // The ranks whose data this rank's result is made of. Other engines may have a rank without a result wait, too, but
  // need not, and who sends what in kAllToAllUneven is the program's affair.
  switch (what.kind) {
    case Kind::kBarrier:
    case Kind::kAllReduce:
    case Kind::kAllGather:
    case Kind::kReduceScatter:
    case Kind::kAllToAll:
      awaited.needs = group.bits();
      break;
    case Kind::kReduce:
    case Kind::kGather:
      awaited.needs = what.root == rank ? group.bits() : 0;
      break;
    case Kind::kBroadcast:
    case Kind::kScatter:
      awaited.needs = what.root == rank ? 0 : group.bit(what.root);
      break;
    case Kind::kAllToAllUneven:
      break;
  }
  return awaited;
}

}  // namespace lockstep
