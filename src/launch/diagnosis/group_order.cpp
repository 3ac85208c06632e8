#include "launch/diagnosis/group_order.h"

#include <algorithm>
#include <bit>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr size_t kBits = 64;

uint64_t bit(size_t rank) { return uint64_t{1} << rank; }

const RankStatus::Group* find_group(const RankStatus& account, uint64_t id) {
  const auto found = std::find_if(account.groups.begin(), account.groups.end(),
                                  [id](const RankStatus::Group& group) { return group.id == id; });
  return found == account.groups.end() ? nullptr : &*found;
}

bool only_waits(const RankView& rank) {
  const RankStatus& account = rank.account;
  return waits(rank) && account.waiting && account.has_one_caller && account.awaited.group != 0;
}

bool needs_some(const RankView& rank) { return rank.account.awaited.needs_some; }

/// The ranks, as bits, that only wait and have not called the collective for which this one waits.
uint64_t missing_calls(const std::vector<RankView>& ranks, size_t waiting) {
  if (!only_waits(ranks[waiting])) return 0;
  uint64_t missing = ranks_not_there(ranks, waiting);
  for (size_t rank = 0; rank < std::min(ranks.size(), kBits); ++rank) {
    if ((missing & bit(rank)) == 0 || only_waits(ranks[rank])) continue;
    if (needs_some(ranks[waiting])) return 0;  // that rank may be the one
    missing &= ~bit(rank);
  }
  return missing;
}

std::string group_of(const RankStatus& account, uint64_t id) {
  const RankStatus::Group* group = find_group(account, id);
  return group == nullptr ? "a group" : printable(group->text());
}

}  // namespace

uint64_t ranks_not_there(const std::vector<RankView>& ranks, size_t waiting) {
  const RankStatus::Awaited& awaited = ranks[waiting].account.awaited;
  uint64_t missing = 0;
  if (awaited.group == 0) return missing;
  for (size_t rank = 0; rank < std::min(ranks.size(), kBits); ++rank) {
    if (rank == waiting || (awaited.needs & bit(rank)) == 0) continue;
    const RankStatus::Group* theirs = find_group(ranks[rank].account, awaited.group);
    if (theirs != nullptr && theirs->collectives < awaited.collective) missing |= bit(rank);
  }
  return missing;
}

std::optional<GroupCycle> find_group_cycle(const std::vector<RankView>& ranks) {
  const size_t count = std::min(ranks.size(), kBits);
  std::vector<uint64_t> missing(count);
  uint64_t stuck = 0;
  for (size_t rank = 0; rank < count; ++rank)
    if ((missing[rank] = missing_calls(ranks, rank)) != 0) stuck |= bit(rank);
  // A rank that waits for none of them may continue.
  for (uint64_t before = 0; before != stuck;) {
    before = stuck;
    for (size_t rank = 0; rank < count; ++rank)
      if (needs_some(ranks[rank]) ? (missing[rank] & ~stuck) != 0 : (missing[rank] & stuck) == 0) stuck &= ~bit(rank);
  }
  if (stuck == 0) return std::nullopt;
  std::vector<size_t> path;
  for (auto at = static_cast<size_t>(std::countr_zero(stuck)); std::find(path.begin(), path.end(), at) == path.end();) {
    path.push_back(at);
    at = static_cast<size_t>(std::countr_zero(missing[at] & stuck));
  }
  const auto first = static_cast<size_t>(std::countr_zero(missing[path.back()] & stuck));
  path.erase(path.begin(), std::find(path.begin(), path.end(), first));
  std::rotate(path.begin(), std::min_element(path.begin(), path.end()), path.end());
  GroupCycle cycle;
  for (const size_t rank : path) {
    const RankStatus::Awaited& awaited = ranks[rank].account.awaited;
    cycle.waits.push_back({static_cast<int>(rank), awaited.group, awaited.collective});
  }
  return cycle;
}

std::string GroupCycle::text(const std::vector<RankView>& ranks) const {
  constexpr size_t kShown = 8;
  std::string text;
  for (size_t i = 0; i < waits.size() && i < kShown; ++i) {
    const int rank = waits[i].rank, next = waits[(i + 1) % waits.size()].rank;
    text += (i == 0 ? "rank " : ", rank ") + std::to_string(rank) + (i == 0 ? " waits" : "") + " for rank " +
            std::to_string(next) + " in " + group_of(ranks[static_cast<size_t>(rank)].account, waits[i].group);
  }
  return waits.size() > kShown ? text + ", and so on" : text;
}

bool wait_in_several_groups(const std::vector<RankView>& ranks) {
  uint64_t first = 0;
  for (const RankView& rank : ranks) {
    const uint64_t group = waits(rank) ? rank.account.awaited.group : 0;
    if (first == 0) first = group;
    if (group != 0 && group != first) return true;
  }
  return false;
}

}  // namespace lockstep
