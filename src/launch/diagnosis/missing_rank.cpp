#include "launch/diagnosis/missing_rank.h"

#include <algorithm>

namespace lockstep {
namespace {

bool is_gone(const RankEnd& end, const std::vector<RankView>& ranks) {
  const RankView& rank = ranks[static_cast<size_t>(end.rank)];
  return !end.how.failed() && !end.stopped && !rank.outlived && may_be_waited_for(rank.account);
}

std::optional<int> gone_rank(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks) {
  const auto end = std::find_if(ends.begin(), ends.end(), [&](const RankEnd& one) { return is_gone(one, ranks); });
  return end == ends.end() ? std::nullopt : std::optional(end->rank);
}

}  // namespace

bool may_be_waited_for(const RankStatus& account) {
  return is_before_join(account) && account.failure == RankFailure::kNone;
}

std::optional<MissingRank> find_missing_rank(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks) {
  const auto gone = gone_rank(ends, ranks);
  if (!gone) return std::nullopt;
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (!ranks[rank].ended && ranks[rank].account.phase == RankStatus::Phase::kJoining)
      return MissingRank{*gone, static_cast<int>(rank)};
  return std::nullopt;
}

bool may_miss_a_rank(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks) {
  return gone_rank(ends, ranks) && std::any_of(ranks.begin(), ranks.end(), [](const RankView& rank) {
           return !rank.ended && may_be_waited_for(rank.account);
         });
}

}  // namespace lockstep
