#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"
#include "collectives/shm/protocol/groups_note.h"
#include "collectives/shm/protocol/work.h"
#include "collectives/shm/segment/world.h"

namespace lockstep::shm {

class Communicator;

/// A group among those of this rank.
struct SearchedGroup {
  uint64_t id = 0;         ///< the same on all its ranks, and no other group's
  std::vector<int> ranks;  ///< by their numbers among all ranks
  std::string name;        ///< "subgroup 0 (ranks 0, 2)"
};

/// Finds ranks that wait for each other in different groups, for programs whose ranks have groups in shared memory
/// alone, and no thread of the library. The threads that wait do it.
///
/// A rank that has waited in one place for kPatience, and of which no other thread may act, writes the place, and what
/// it has called of each group, where all ranks see it, and withdraws that before its wait ends. A rank tells the
/// others if it has seen for kSameFor that they cannot go on (ranks_stuck_in_groups()), and each of them has meanwhile
/// made what progress it could, more than once, in the same wait. So a rank that computes, polls, is stopped, or does
/// not get a processor is never among them, nor is one of which another thread computes or sleeps. Ranks that wait for
/// each other in one group are left to StuckSearch. All groups end in which one of the ranks waits.
class GroupsSearch {
 public:
  static constexpr std::chrono::milliseconds kPatience{1500}, kSameFor{600}, kLook{100};

  /// `all` is the group of all ranks. `places` has where the memory of each rank's note begins, as Arena::offset()
  /// tells; this rank's has been filled with zeros before it told the place.
  GroupsSearch(const World& all, const std::vector<uint64_t>& places);

  /// REQUIRES: the group is removed before it is destroyed.
  void add(Communicator& group, SearchedGroup known);
  void remove(const Communicator& group);

  /// Why this rank cannot go on.
  struct Found {
    std::string text;
    int culprit = 0;  ///< one that it waits for, as a rank of the group in which it waits
  };
  /// Called now and then by a thread that waits for `work` in `group`, whose mutex it holds, after it has made what
  /// progress it could. `waiting` has the group's numbers of the ranks.
  std::optional<Found> look(const Communicator& group, const Work& work, const Waiting& waiting);
  /// Called when the wait is over, before the thread does anything else. If that is so because a rank was told, this
  /// one ends the same groups: what it calls next must not let another one go on.
  void end(const Communicator& group, const Work& work);

 private:
  struct Known {
    Communicator* group;
    SearchedGroup names;
  };
  struct Stuck {
    uint64_t serial = 0, beat = 0;  ///< serial 0: it is not stuck
  };
  GroupsNote& note(int rank) const { return *notes_[static_cast<size_t>(rank)]; }
  GroupsNote& own() const { return note(rank_); }
  /// The group's ranks, as bits of all.
  static uint64_t among_all(const SearchedGroup& group, uint64_t ranks);
  /// None: another thread is in one of the groups, or there are too many.
  std::optional<GroupWait> describe(const Communicator& group, const Waiting& waiting) const LOCKSTEP_REQUIRES(mutex_);
  /// What another rank, or this one, has found. Ends the other groups in which one of the ranks waits.
  std::optional<Found> told(const Communicator& group) LOCKSTEP_REQUIRES(mutex_);
  /// Whether the same ranks have been stuck, and made progress in vain, for long enough.
  bool is_certain(const std::vector<GroupsNote::Seen>& seen, const std::vector<bool>& stuck) LOCKSTEP_REQUIRES(mutex_);
  std::optional<Found> search(const Communicator& group) LOCKSTEP_REQUIRES(mutex_);

  const int rank_;
  const std::vector<std::shared_ptr<SharedSegment>> segments_;  ///< keep the notes
  const std::vector<GroupsNote*> notes_;                        ///< by rank

  Mutex mutex_;
  std::map<const Communicator*, Known> groups_ LOCKSTEP_GUARDED_BY(mutex_);
  const Work* waited_ LOCKSTEP_GUARDED_BY(mutex_) = nullptr;  ///< only compared
  uint64_t needs_ LOCKSTEP_GUARDED_BY(mutex_) = 0;            ///< of the wait
  uint64_t serial_ LOCKSTEP_GUARDED_BY(mutex_) = 0;           ///< of its note; 0: it has none
  Clock::time_point since_ LOCKSTEP_GUARDED_BY(mutex_);
  Clock::time_point next_look_ LOCKSTEP_GUARDED_BY(mutex_);
  std::vector<Stuck> stuck_ LOCKSTEP_GUARDED_BY(mutex_);  ///< by rank, as first seen
  Clock::time_point stuck_since_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep::shm
