#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"

// What machines have contributed to the rounds of a RoundHub: to those that are closed, and to those that are open.

namespace lockstep::hosts {

/// The pseudo-gradients that are in the outer copy, by machine.
class CountedSteps {
 public:
  struct Counted {
    int64_t round = 0, step = 0;
  };
  void add(int island, Counted one) { counted_[island].push_back(one); }
  /// The last of a machine for each of so many fragments, in the order of their rounds from 0 on; zeros: there is none.
  std::vector<Counted> last(int island, int fragments) const;
  /// Forgets those after a round, because no machine has the outer copy of a later one.
  void go_back(int64_t round);

 private:
  std::map<int, std::vector<Counted>> counted_;  // in the order of rounds
};

struct Contribution {
  int64_t step = 0;
  bool takes_part = false;
  uint64_t outer = 0;  ///< a hash of the outer copy
  std::string bytes;
};

/// The rounds that some have contributed to: a machine that goes on training while a fragment travels is ahead of the
/// others by several.
class OpenRounds {
 public:
  struct Round {
    std::optional<Clock::time_point> first, last;  ///< contributions
    std::map<int, Contribution> sent;              ///< in the order of the machines
  };

  /// The first of a machine to a round counts.
  void add(int64_t round, int island, Contribution one);
  bool has_any_of(int island) const;
  const Round& at(int64_t round) const;
  Round take(int64_t round);
  void drop(int64_t round) { rounds_.erase(round); }
  /// Forgets what a machine has contributed.
  void drop_all_of(int island);
  void clear() { rounds_.clear(); }

 private:
  std::map<int64_t, Round> rounds_;
};

}  // namespace lockstep::hosts
