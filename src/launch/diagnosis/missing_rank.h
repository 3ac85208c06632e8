#pragma once

#include <optional>
#include <vector>

#include "launch/diagnosis/rank_end.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

/// A rank that ended with exit code 0 before it joined, while another waits for it.
struct MissingRank {
  int rank = 0;
  int witness = 0;  ///< the first that waits
};

/// Finds the first such rank. While no rank waits, a program that needs no other rank (`true`, a script, Python) does
/// not count. Nor does a rank whose child process still lives, because that may join in its place.
std::optional<MissingRank> find_missing_rank(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks);

/// Whether a running rank may still come to wait for one that ended like this.
bool may_miss_a_rank(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks);

/// Whether the rank has neither joined nor failed to, so that others may wait for it to join.
bool may_be_waited_for(const RankStatus& account);

}  // namespace lockstep
