#include "launch/diagnosis/stall.h"

#include <algorithm>
#include <bit>
#include <functional>

#include "base/rank_names.h"
#include "base/text.h"
#include "launch/diagnosis/group_order.h"

namespace lockstep {
namespace {

/// Goes by the rank's own statement. Otherwise a rank that has started a collective may still compute before it waits
/// for it.
bool sits_in_a_wait(const RankStatus& account) { return account.waiting || account.waits_for != 0; }

/// Python programs start collectives for which they never wait; a waiting rank names the ranks.
bool is_in_collective(const RankStatus& account) {
  return sits_in_a_wait(account) || (account.operation.running && account.phase != RankStatus::Phase::kCommunicates);
}

std::vector<int> ranks_of(uint64_t bits) {
  std::vector<int> ranks;
  for (; bits != 0; bits &= bits - 1) ranks.push_back(std::countr_zero(bits));
  return ranks;
}

std::string name(int rank) { return "rank " + std::to_string(rank); }

std::string operation_of(const RankView& rank) { return printable(rank.account.operation.text()); }

/// The operation that the rank waits for, which may be older than the last one that it started.
std::string awaited_by(const RankView& rank) {
  const RankStatus& account = rank.account;
  const RankStatus::Awaited& awaited = account.awaited;
  const bool is_last = awaited.group == account.operation.group_id && awaited.sequence == account.operation.sequence;
  if (awaited.group == 0 || is_last) return operation_of(rank);
  std::string text = "operation #" + std::to_string(awaited.sequence);
  for (const RankStatus::Group& group : account.groups)
    if (group.id == awaited.group) text += " in " + printable(group.text());
  return text + " (started last: " + operation_of(rank) + ")";
}

/// Goes by its engine's account, if that knows.
uint64_t awaited_ranks(const std::vector<RankView>& ranks, size_t waiting) {
  const uint64_t known = ranks[waiting].account.waits_for;
  return known != 0 ? known : ranks_not_there(ranks, waiting);
}

std::string line_of(int number, const std::vector<RankView>& ranks, bool computes) {
  const RankView& rank = ranks[static_cast<size_t>(number)];
  if (rank.ended) return name(number) + " has ended; its last collective: " + operation_of(rank);
  if (is_stopped(rank)) return name(number) + " is STOPPED (SIGSTOP); its last collective: " + operation_of(rank);
  if (waits(rank) && !computes) {
    std::string text = name(number) + " waits in " + awaited_by(rank);
    const uint64_t awaited = awaited_ranks(ranks, static_cast<size_t>(number));
    return awaited == 0 ? text : text + " for rank " + list_ranks(ranks_of(awaited));
  }
  if (rank.account.phase == RankStatus::Phase::kJoining) return name(number) + " waits for all ranks to join";
  const char* doing = computes                    ? " computes"
                      : rank.process_state == 'D' ? " is in a system call that cannot be interrupted"
                                                  : " is not in a collective";
  return name(number) + doing + "; its last one: " + operation_of(rank);
}

/// A stopped rank, else one that does not wait but that a waiting rank names, else any that does not wait; -1: none.
int find_culprit(const std::vector<RankView>& ranks, const std::function<bool(size_t)>& computes) {
  uint64_t named = 0;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (waits(ranks[i])) named |= awaited_ranks(ranks, i);
  int best = -1, best_score = 0;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[i].ended || (waits(ranks[i]) && !computes(i))) continue;
    const bool is_named = i < 64 && (named >> i & 1) != 0;
    const int score = 1 + (is_named ? 1 : 0) + (is_stopped(ranks[i]) ? 2 : 0);
    if (score > best_score) best = static_cast<int>(i), best_score = score;
  }
  return best;
}

int furthest_behind(const std::vector<RankView>& ranks) {
  int last = -1;
  for (size_t i = 0; i < ranks.size(); ++i)
    if (waits(ranks[i]) &&
        (last < 0 || ranks[i].account.operation.sequence < ranks[static_cast<size_t>(last)].account.operation.sequence))
      last = static_cast<int>(i);
  return last;
}

}  // namespace

bool is_stopped(const RankView& rank) { return rank.process_state == 'T' || rank.process_state == 't'; }

bool is_before_join(const RankStatus& account) {
  return account.phase == RankStatus::Phase::kUnknown || account.phase == RankStatus::Phase::kJoining;
}

bool takes_part(const RankView& rank) {
  const auto phase = rank.account.phase;
  return !rank.ended && (phase == RankStatus::Phase::kJoined || phase == RankStatus::Phase::kCommunicates);
}

bool waits(const RankView& rank) { return takes_part(rank) && is_in_collective(rank.account) && !is_stopped(rank); }

bool may_be_awaited(const RankView& rank) {
  const auto phase = rank.account.phase;
  const bool left = phase == RankStatus::Phase::kLeft || phase == RankStatus::Phase::kLeftByException;
  return !rank.ended && !left && !is_stopped(rank) && !sits_in_a_wait(rank.account);
}

std::optional<Stall> diagnose(const std::vector<RankView>& ranks, const std::vector<bool>& computing) {
  const auto computes = [&](size_t rank) { return rank < computing.size() && computing[rank]; };
  const auto waiting = std::find_if(ranks.begin(), ranks.end(), waits);
  const bool stopped = std::any_of(ranks.begin(), ranks.end(),
                                   [](const RankView& rank) { return takes_part(rank) && is_stopped(rank); });
  if (waiting == ranks.end() && !stopped) return std::nullopt;
  Stall stall;
  stall.culprit = find_culprit(ranks, computes);
  if (const auto cycle = stopped ? std::nullopt : find_group_cycle(ranks)) {
    stall.kind = Stall::Kind::kGroupOrder;
    stall.culprit = cycle->waits.front().rank;
    stall.what = cycle->text(ranks);
  } else if (stall.culprit < 0) {
    stall.kind = Stall::Kind::kAllWait;
    stall.culprit = furthest_behind(ranks);
    stall.what = wait_in_several_groups(ranks)
                     ? "all ranks wait, in collectives of different groups"
                     : "all ranks wait, " + name(stall.culprit) + " in the earliest collective";
  } else if (is_stopped(ranks[static_cast<size_t>(stall.culprit)])) {
    stall.kind = Stall::Kind::kStopped;
    stall.what = name(stall.culprit) + " is STOPPED";
  } else if (computes(static_cast<size_t>(stall.culprit))) {
    stall.kind = Stall::Kind::kComputes;
    stall.what = name(stall.culprit) + " computes and has not reached " + awaited_by(*waiting);
  } else {
    stall.what = name(stall.culprit) + " has not reached " + awaited_by(*waiting);
  }
  for (size_t i = 0; i < ranks.size() && stall.lines.size() < Stall::kLines; ++i)
    stall.lines.push_back(line_of(static_cast<int>(i), ranks, computes(i)));
  return stall;
}

}  // namespace lockstep
