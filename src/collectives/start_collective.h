#pragma once

#include <cstdint>

#include "collectives/shm/protocol/request.h"
#include "rank_page/page_group.h"

namespace lockstep {

/// Records that a collective of the group begins on this rank, number `rank` of it. Returns what the rank's page shows
/// while a thread waits for it; `sequence` is its number in messages. `compares_all`: the engine compares the calls of
/// all ranks before it moves anything, as the shared-memory engine does.
inline RankStatus::Awaited start_collective(PageGroup& group, int rank, uint64_t sequence, const shm::Request& what,
                                            bool compares_all) {
  using Kind = shm::OperationKind;
  RankStatus::Awaited awaited{.sequence = sequence, .collective = group.start_collective()};
  if (compares_all) {
    awaited.needs = group.bits();
    return awaited;
  }
  // The ranks whose data this rank's result is made of. Other engines need not have a rank without a result wait; if it
  // does, it waits for ranks to which it sends. The program decides which ranks send in kAllToAllUneven.
  const auto need_some = [&] {
    awaited.needs = group.bits();
    awaited.needs_some = true;
  };
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
      if (what.root == rank)
        awaited.needs = group.bits();
      else
        need_some();
      break;
    case Kind::kBroadcast:
    case Kind::kScatter:
      if (what.root == rank)
        need_some();
      else
        awaited.needs = group.bit(what.root);
      break;
    case Kind::kAllToAllUneven:
      need_some();
      break;
  }
  return awaited;
}

}  // namespace lockstep
