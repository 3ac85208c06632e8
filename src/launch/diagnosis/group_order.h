#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "launch/diagnosis/stall.h"

namespace lockstep {

/// A cycle of ranks, each waiting in a collective that the next has not called. Within a group collectives have one
/// order, so such ranks have used several groups in different orders.
struct GroupCycle {
  struct Wait {
    int rank = 0;
    uint64_t group = 0;       ///< RankStatus::Group::id
    uint64_t collective = 0;  ///< of the group, counted from 1
    bool operator==(const Wait&) const = default;
  };

  std::vector<Wait> waits;
  bool operator==(const GroupCycle&) const = default;

  /// "rank 0 waits for rank 1 in the group of all ranks, rank 1 for rank 0 in subgroup 0 (ranks 0, 1)".
  std::string text(const std::vector<RankView>& ranks) const;
};

/// Finds a cycle, which is a deadlock with any engine: each rank waits for data of the next, whose only thread that has
/// called collectives also waits. A rank that calls from several threads is in no cycle, because a page shows the wait
/// of one thread; nor is a rank that waits for a message, or for a rank whose page had no room for the group.
std::optional<GroupCycle> find_group_cycle(const std::vector<RankView>& ranks);

/// The ranks, as bits, whose pages show that they have not called the collective for which `waiting` waits.
uint64_t ranks_not_there(const std::vector<RankView>& ranks, size_t waiting);

bool wait_in_several_groups(const std::vector<RankView>& ranks);

}  // namespace lockstep
