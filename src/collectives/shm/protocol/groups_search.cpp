#include "collectives/shm/protocol/groups_search.h"

#include <algorithm>
#include <bit>
#include <set>
#include <utility>

#include "base/library_thread.h"
#include "base/thread_token.h"
#include "collectives/shm/protocol/channels.h"
#include "collectives/shm/protocol/communicator.h"
#include "collectives/shm/protocol/verdict.h"

namespace lockstep::shm {
namespace {

/// A rank's last progress before its second beat came after what made the finder look at its first.
constexpr uint64_t kBeats = 2;

std::vector<std::shared_ptr<SharedSegment>> segments_of(const World& all) {
  std::vector<std::shared_ptr<SharedSegment>> segments;
  for (int rank = 0; rank < all.size(); ++rank) segments.push_back(all.segment(rank));
  return segments;
}

std::vector<GroupsNote*> notes_in(const World& all, const std::vector<uint64_t>& places) {
  std::vector<GroupsNote*> notes;
  for (int rank = 0; rank < all.size(); ++rank)
    notes.push_back(reinterpret_cast<GroupsNote*>(all.resident(rank) + places[static_cast<size_t>(rank)]));
  return notes;
}

/// A stuck rank of the group other than this one, as a rank of the group.
int culprit_in(const SearchedGroup& group, uint64_t stuck) {
  for (size_t i = 0; i < group.ranks.size(); ++i)
    if ((stuck >> group.ranks[i] & 1) != 0) return static_cast<int>(i);
  return 0;
}

}  // namespace

GroupsSearch::GroupsSearch(const World& all, const std::vector<uint64_t>& places)
    : rank_(all.rank()), segments_(segments_of(all)), notes_(notes_in(all, places)) {}

void GroupsSearch::add(Communicator& group, SearchedGroup known) {
  const MutexLock lock(mutex_);
  groups_.insert_or_assign(&group, Known{&group, std::move(known)});
}

void GroupsSearch::remove(const Communicator& group) {
  const MutexLock lock(mutex_);
  groups_.erase(&group);
}

uint64_t GroupsSearch::among_all(const SearchedGroup& group, uint64_t ranks) {
  uint64_t bits = 0;
  for (; ranks != 0; ranks &= ranks - 1)
    bits |= uint64_t{1} << group.ranks[static_cast<size_t>(std::countr_zero(ranks))];
  return bits;
}

std::optional<GroupWait> GroupsSearch::describe(const Communicator& group, const Waiting& waiting) const {
  const SearchedGroup& here = groups_.at(&group).names;
  GroupWait wait{.kind = waiting.kind,
                 .group = here.id,
                 .operation = waiting.operation,
                 .needs = among_all(here, group.world().others()),
                 .any_is_enough = waiting.kind == Waiting::Kind::kReceive && waiting.peer == kAnySource};
  std::string what;
  if (waiting.kind == Waiting::Kind::kCollective) {
    what = announced(group.world(), group.rank(), waiting.operation);
  } else {
    std::string peer = "any rank";
    if (waiting.peer != kAnySource) {
      const int rank = here.ranks[static_cast<size_t>(waiting.peer)];
      wait.needs = uint64_t{1} << rank;
      peer = "rank " + std::to_string(rank);
    }
    what = (waiting.kind == Waiting::Kind::kSend ? "a send to " : "a recv from ") + peer + " with tag " +
           std::to_string(waiting.tag);
  }
  wait.place = ("in " + what + ", in " + here.name).substr(0, GroupsNote::kPlace);
  if (groups_.size() > GroupsNote::kGroups) return std::nullopt;
  for (const auto& [pointer, known] : groups_) {
    Waiting calls = waiting;
    const auto ask = [&](Waiter& waiter) { calls = waiter.calls(); };
    if (pointer != &group && !known.group->with_waiter(ask, /*at_once=*/true)) return std::nullopt;
    const SearchedGroup& names = known.names;
    wait.calls.push_back(
        {names.id, calls.started, among_all(names, calls.sends_to), among_all(names, calls.receives_of)});
  }
  return wait;
}

std::optional<GroupsSearch::Found> GroupsSearch::told(const Communicator& group) {
  if (serial_ == 0) return std::nullopt;
  for (const GroupsNote* const note : notes_) {
    const auto finding = note->finding();
    const uint64_t own_bit = uint64_t{1} << rank_;
    if (!finding || finding->serials[static_cast<size_t>(rank_)] != serial_ || (finding->ranks & own_bit) == 0)
      continue;
    const uint64_t others = finding->ranks & ~own_bit;
    for (const auto& [pointer, known] : groups_) {
      const auto& waited_in = finding->groups;
      if (pointer == &group || std::find(waited_in.begin(), waited_in.end(), known.names.id) == waited_in.end())
        continue;
      known.group->with_waiter(
          [&, names = &known.names](Waiter& waiter) {
            waiter.end_stuck(Verdict::Cause::kStuckInGroups, culprit_in(*names, others), finding->text);
          },
          /*at_once=*/true);
    }
    return Found{.text = finding->text, .culprit = culprit_in(groups_.at(&group).names, needs_ & others)};
  }
  return std::nullopt;
}

bool GroupsSearch::is_certain(const std::vector<GroupsNote::Seen>& seen, const std::vector<bool>& stuck) {
  const auto same = [&](size_t rank) { return stuck_[rank].serial == (stuck[rank] ? seen[rank].serial : 0); };
  bool is_same = stuck_.size() == seen.size(), all_tried = true;
  for (size_t rank = 0; rank < seen.size() && is_same; ++rank) {
    is_same = same(rank);
    all_tried = all_tried && (!stuck[rank] || seen[rank].beat >= stuck_[rank].beat + kBeats);
  }
  if (is_same) return all_tried && Clock::now() - stuck_since_ >= kSameFor;
  stuck_.clear();
  for (size_t rank = 0; rank < seen.size(); ++rank)
    stuck_.push_back(stuck[rank] ? Stuck{seen[rank].serial, seen[rank].beat} : Stuck{});
  stuck_since_ = Clock::now();
  return false;
}

std::optional<GroupsSearch::Found> GroupsSearch::search(const Communicator& group) {
  std::vector<GroupsNote::Seen> seen;
  GroupWaits waits;
  for (const GroupsNote* const note : notes_) {
    seen.push_back(note->read());
    waits.push_back(seen.back().wait);
  }
  const std::vector<bool> stuck = ranks_stuck_in_groups(waits);
  GroupsNote::Finding finding;
  std::set<uint64_t> groups;
  for (size_t rank = 0; rank < waits.size(); ++rank) {
    if (!stuck[rank]) continue;
    finding.ranks |= uint64_t{1} << rank;
    finding.serials[rank] = seen[rank].serial;
    finding.groups[rank] = waits[rank].group;
    groups.insert(waits[rank].group);
  }
  if (!stuck[static_cast<size_t>(rank_)] || groups.size() < 2) {
    stuck_.clear();
    return std::nullopt;
  }
  if (!is_certain(seen, stuck) || another_thread_may_act(thread_number())) return std::nullopt;
  finding.text = places_of(waits, stuck, GroupsNote::kText - 1);
  own().tell(finding);
  return told(group);
}

std::optional<GroupsSearch::Found> GroupsSearch::look(const Communicator& group, const Work& work,
                                                      const Waiting& waiting) {
  const MutexLock lock(mutex_);
  if (!groups_.contains(&group)) return std::nullopt;
  if (auto found = waited_ == &work ? told(group) : std::nullopt) return found;
  const auto now = Clock::now();
  if (waited_ != &work) {
    if (std::exchange(serial_, 0) != 0) own().withdraw();  // another thread waits, too
    waited_ = &work;
    since_ = now;
    next_look_ = now + kPatience;
    stuck_.clear();
  }
  if (now < next_look_) return std::nullopt;
  next_look_ = now + kLook;
  if (serial_ == 0) {
    const auto wait = another_thread_may_act(thread_number()) ? std::nullopt : describe(group, waiting);
    if (!wait) {
      next_look_ = now + kPatience;
      return std::nullopt;
    }
    needs_ = wait->needs;
    serial_ = own().say(*wait);
  }
  own().beat();
  return search(group);
}

void GroupsSearch::end(const Communicator& group, const Work& work) {
  const MutexLock lock(mutex_);
  if (waited_ != &work) return;
  if (work.failed()) told(group);
  waited_ = nullptr;
  if (std::exchange(serial_, 0) != 0) own().withdraw();
}

}  // namespace lockstep::shm
