#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace lockstep::shm {

/// The numbers by which messages to the user, and the launcher, know the ranks of a group.
class RankNumbers {
 public:
  /// Sets the names of the group's ranks in messages, if they are part of a larger group: one number for each.
  void call_ranks(std::vector<int> names) { names_ = std::move(names); }
  int name_of(int rank) const { return names_.empty() ? rank : names_[static_cast<size_t>(rank)]; }

  /// The launcher's number for the next rank; -1 if there is no launcher, or it has no such rank.
  void add_launched(int number) { launched_.push_back(number); }
  int launched_rank(int rank) const { return launched_[static_cast<size_t>(rank)]; }
  /// The launcher's numbers for ranks as bits. Ranks without a number, or with one above 63, are left out.
  uint64_t launched_ranks(uint64_t ranks) const {
    uint64_t launched = 0;
    for (; ranks != 0; ranks &= ranks - 1)
      if (const int rank = launched_rank(std::countr_zero(ranks)); rank >= 0 && rank < 64)
        launched |= uint64_t{1} << rank;
    return launched;
  }

 private:
  std::vector<int> launched_;
  std::vector<int> names_;
};

}  // namespace lockstep::shm
