#include "launch/diagnosis/blame.h"

#include <algorithm>

#include "launch/launch_error.h"

namespace lockstep {
namespace {

using Ground = Blame::Ground;

/// These codes are no failure of a program that was asked to leave.
bool is_leaving(const ProcessEnd& how) {
  return how.kind == ProcessEnd::Kind::kExited && (how.value == kExitPreempted || how.value == kExitPreemptedUnsaved);
}

Blame blame_by_order(const std::vector<RankEnd>& ends, const RankEnd& first) {
  std::vector<RankEnd> together;
  for (const auto& end : ends)
    if (end.how.failed() && end.wake_up == first.wake_up) together.push_back(end);
  if (std::any_of(together.begin(), together.end(), was_killed))
    std::erase_if(together, [](const RankEnd& end) { return !was_killed(end); });
  // A lost machine ends all its ranks.
  if (together[0].how.kind == ProcessEnd::Kind::kLost) together.resize(1);
  Blame blame{.ground = Ground::kOwnEnd, .culprit = together[0], .speaker = together[0].rank};
  for (size_t i = 1; i < together.size(); ++i) blame.also_suspect.push_back(together[i].rank);
  std::sort(blame.also_suspect.begin(), blame.also_suspect.end());
  return blame;
}

bool accuses(const RankStatus& account) {
  return account.failure == RankFailure::kPeer || account.failure == RankFailure::kMissing ||
         account.failure == RankFailure::kMismatch;
}

/// The rank that `victim`, which cannot name its peer, may mean: one that failed without accusing any, else one that is
/// still running.
std::optional<int> unnamed_culprit(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks, int victim) {
  std::optional<int> alive;
  for (int rank = 0; rank < static_cast<int>(ranks.size()); ++rank) {
    const RankStatus& account = ranks[static_cast<size_t>(rank)].account;
    if (rank == victim || accuses(account)) continue;
    const RankEnd* end = find_end(ends, rank);
    if (is_own(account.failure) || (end != nullptr && end->failed_by_itself())) return rank;
    if (end == nullptr && !alive) alive = rank;
  }
  return alive;
}

struct Chain {
  int root;     ///< the rank that all finally accuse
  int witness;  ///< the rank whose page names the root
  bool named;
};

/// Follows the accusations from the rank that failed first. Empty if they lead nowhere.
std::optional<Chain> follow(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks, int first) {
  Chain chain{first, first, true};
  for (size_t links = 0; links <= ranks.size(); ++links) {
    const RankStatus& account = ranks[static_cast<size_t>(chain.root)].account;
    const RankEnd* end = find_end(ends, chain.root);
    const bool killed = end != nullptr && was_killed(*end) && !end->stopped;
    const bool of_all = account.failure == RankFailure::kMismatch && account.peer < 0;
    if (killed || of_all || !accuses(account) || account.peer == chain.root) return chain;
    int next = account.peer;
    if (next < 0) {
      const auto other = unnamed_culprit(ends, ranks, chain.root);
      if (!other) return std::nullopt;
      next = *other;
      chain.named = false;
    }
    chain.witness = chain.root;
    chain.root = next;
    // Two ranks whose calls differ do not cause each other's failure.
    if (account.failure == RankFailure::kMismatch) return chain;
  }
  return std::nullopt;  // a cycle
}

/// For ranks that cannot name the rank that they miss: the culprit may have lost the others because it came too late.
void blame_for_coming_late(Blame& blame, const std::vector<RankView>& ranks) {
  if (ranks[static_cast<size_t>(blame.culprit->rank)].account.failure != RankFailure::kPeer) return;
  const auto waited = std::find_if(ranks.begin(), ranks.end(), [](const RankView& rank) {
    return rank.account.failure == RankFailure::kMissing && rank.account.peer < 0;
  });
  if (waited == ranks.end()) return;
  blame.ground = Ground::kLateness;
  blame.witness = blame.speaker = static_cast<int>(waited - ranks.begin());
}

/// Judges by the statements on the pages, if the first rank to fail may be a victim.
Blame blame_by_accusation(const std::vector<RankEnd>& ends, const std::vector<RankView>& ranks, const RankEnd& first) {
  Blame by_order = blame_by_order(ends, first);
  if (was_killed(*by_order.culprit)) return by_order;
  const int start = by_order.culprit->rank;
  const auto chain = follow(ends, ranks, start);
  if (!chain) blame_for_coming_late(by_order, ranks);
  if (!chain || chain->root == start) return by_order;
  const RankStatus& witness = ranks[static_cast<size_t>(chain->witness)].account;
  const RankStatus& accused = ranks[static_cast<size_t>(chain->root)].account;
  const RankEnd* end = find_end(ends, chain->root);
  if (!chain->named && end == nullptr && !is_own(accused.failure)) {
    by_order.settled = false;  // the accused rank has not appeared yet
    if (witness.failure != RankFailure::kMissing) return by_order;
    by_order.ground = Ground::kLateness;
    by_order.speaker = chain->witness;
    return by_order;
  }
  Blame blame{.ground = Ground::kAccusation,
              .culprit = end != nullptr ? *end : RankEnd{.rank = chain->root, .pid = accused.pid, .ended = false},
              .speaker = chain->witness,
              .settled = end != nullptr,
              .witness = chain->witness};
  if (witness.failure == RankFailure::kMismatch)
    blame.opponent = witness.opponent >= 0 ? witness.opponent : chain->witness;
  return blame;
}

}  // namespace

Blame find_culprit(const Evidence& evidence) {
  if (evidence.hang) {
    const int rank = evidence.hang->culprit;
    const RankEnd* end = find_end(evidence.ends, rank);
    return {.ground = Ground::kHang,
            .culprit = end != nullptr ? *end : RankEnd{.rank = rank, .ended = false},
            .speaker = rank};
  }
  if (evidence.missing)
    return {.ground = Ground::kAbsence,
            .culprit = *find_end(evidence.ends, evidence.missing->rank),
            .speaker = evidence.missing->witness,
            .witness = evidence.missing->witness};
  std::vector<RankEnd> ends = evidence.ends;
  if (evidence.was_asked_to_end())
    for (RankEnd& end : ends)
      if (is_leaving(end.how)) end.how.value = 0;
  const auto first = std::find_if(ends.begin(), ends.end(), [](const RankEnd& end) { return end.how.failed(); });
  // Ranks that fail after they were told to stop fail because of that.
  if (first == ends.end() || (evidence.was_asked_to_end() && first->stopped)) return {};
  return blame_by_accusation(ends, evidence.ranks, *first);
}

bool is_own(RankFailure failure) {
  return failure == RankFailure::kOwn || failure == RankFailure::kStorage || failure == RankFailure::kInput ||
         failure == RankFailure::kLimit;
}

}  // namespace lockstep
