#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "collectives/shm/protocol/stuck_search.h"
#include "collectives/shm/segment/layout.h"

namespace lockstep::shm {

// What ranks tell each other for GroupsSearch, in memory that all of them see. Sets of ranks are bits, by their numbers
// among all ranks.

/// What a rank has called of one of its groups.
struct GroupCalls {
  uint64_t group = 0;        ///< SearchedGroup::id
  uint64_t started = 0;      ///< collectives
  uint64_t sends_to = 0;     ///< ranks that have not taken all that it has sent them
  uint64_t receives_of = 0;  ///< ranks of which it has called a receive that is not done
};

/// The wait of a rank in one of its groups, while no thread of it may do anything else.
struct GroupWait {
  Waiting::Kind kind = Waiting::Kind::kNothing;
  uint64_t group = 0;
  uint64_t operation = 0;  ///< kCollective: its number in the group
  uint64_t needs = 0;      ///< the ranks of whose calls it needs all or, if `any_is_enough`, one
  bool any_is_enough = false;
  std::vector<GroupCalls> calls{};  ///< of each of its groups
  std::string place{};              ///< "in operation 3, barrier(), in subgroup 0 (ranks 0, 1)"
};

/// By rank; kNothing: it does not wait, or says nothing.
using GroupWaits = std::vector<GroupWait>;

/// The ranks that can never go on: each waits for a call that another of them, or one of several, has not made, and
/// cannot make while it waits. The ages of the notes do not matter: a rank makes no call before it has withdrawn its
/// note, so none of such ranks was the first to go on.
std::vector<bool> ranks_stuck_in_groups(const GroupWaits& waits);

/// "rank 0 in operation 3, ...; ranks 1, 2 in ...", for those ranks, as long as it may be.
std::string places_of(const GroupWaits& waits, const std::vector<bool>& stuck, size_t most);

/// One rank's memory. Only it writes, in words, behind serial numbers that are odd meanwhile. Zeros: it says nothing.
class GroupsNote {
 public:
  static constexpr size_t kGroups = 60, kPlace = 192, kText = 448;

  struct Seen {
    uint64_t serial = 0;  ///< 0: it is being written
    uint64_t beat = 0;
    GroupWait wait;
  };
  /// Others' ranks that cannot go on, as a rank has found.
  struct Finding {
    uint64_t ranks = 0;
    std::array<uint64_t, kMaxRanks> serials{}, groups{};  ///< of their waits
    std::string text;
  };

  /// The rank waits; its serial, which is even. REQUIRES: at most kGroups groups.
  uint64_t say(const GroupWait& wait);
  void withdraw() { say({}); }
  /// It has made what progress it could, and still waits.
  void beat() { beat_.fetch_add(1); }
  Seen read() const;

  void tell(const Finding& finding);
  std::optional<Finding> finding() const;

 private:
  using Word = std::atomic<uint64_t>;

  Word serial_, beat_, kind_, group_, operation_, needs_, count_;
  Word calls_[kGroups][4];
  Word place_[kPlace / 8];
  Word found_serial_, found_ranks_;
  Word found_waits_[kMaxRanks], found_groups_[kMaxRanks];
  Word found_text_[kText / 8];
};

}  // namespace lockstep::shm
