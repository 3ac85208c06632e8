#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "rank_page/rank_board.h"

namespace lockstep {

/// A process group that is shown on this rank's page while this object lives: the launcher learns in which group the
/// rank waits, and how many collectives it has started there. A default-constructed one is not shown.
class PageGroup {
 public:
  PageGroup() = default;
  /// `ranks` has, for each rank of the group, its number at the launcher. `name` is empty for the group of all ranks.
  /// Both, and the order in which a process makes groups of one name, are equal on all ranks of the group.
  PageGroup(std::string name, std::vector<int> ranks);
  PageGroup(PageGroup&& other) noexcept { *this = std::move(other); }
  PageGroup& operator=(PageGroup&& other) noexcept;
  ~PageGroup();

  /// The group of those of this group's ranks that form its subgroup `number`, counted from 0.
  PageGroup part(int number, const std::vector<int>& ranks) const;

  /// Its place on the page; RankPage::kNoGroup if it is not shown.
  int place() const { return place_; }
  /// Begins the next collective; returns its number, counted from 1. If several threads call, the numbers may be wrong.
  uint64_t start_collective() {
    const uint64_t number = collectives_.load(std::memory_order_relaxed) + 1;
    collectives_.store(number, std::memory_order_relaxed);
    if (place_ != RankPage::kNoGroup) own_page().note_collective(place_, number);
    return number;
  }
  /// For messages that use the ranks' numbers in a subgroup: "\nRanks 0, 1 of subgroup 0 are ranks 2, 3 of all."; empty
  /// for the group of all ranks, or if the numbers are unknown.
  std::string names_of_ranks() const;
  /// RankStatus::Group::id; 0 if it is not shown.
  uint64_t id() const { return place_ == RankPage::kNoGroup ? 0 : id_; }
  /// The bit of a rank of the group, and of all its ranks; 0 if unknown.
  uint64_t bit(int rank) const;
  uint64_t bits() const { return bits_; }

 private:
  std::string name_;
  std::vector<int> ranks_;
  uint64_t id_ = 0, bits_ = 0;
  std::atomic<uint64_t> collectives_{0};
  int place_ = RankPage::kNoGroup;
};

/// The group of all ranks of the launcher that started this process or, without one, of all ranks that have met; not
/// shown if the launcher has other ranks.
PageGroup page_group_of_all(int rank, int world_size);

}  // namespace lockstep
