#pragma once

#include <string>
#include <vector>

namespace lockstep::hierarchical_engine {

/// Which ranks of a group share a machine. Machines are numbered in the order of their first ranks.
struct Layout {
  int rank;                             ///< this one
  std::vector<int> machine_of;          ///< each rank's machine
  std::vector<int> local_of;            ///< each rank's number among the ranks of its machine
  std::vector<std::vector<int>> ranks;  ///< on each machine, ascending

  /// `machines` has a name for each rank's machine.
  static Layout of(int rank, const std::vector<std::string>& machines);

  int world_size() const { return static_cast<int>(machine_of.size()); }
  int machines() const { return static_cast<int>(ranks.size()); }
  int here() const { return machine_of[static_cast<size_t>(rank)]; }
  int local() const { return local_of[static_cast<size_t>(rank)]; }
  int ranks_on(int machine) const { return static_cast<int>(ranks[static_cast<size_t>(machine)].size()); }
  int most_on_a_machine() const;  ///< ranks
  /// The rank of a machine that serves rail `rail`: the one with this number, where there are so many.
  int on_rail(int machine, int rail) const {
    return ranks[static_cast<size_t>(machine)][static_cast<size_t>(rail % ranks_on(machine))];
  }
  /// So many ranks of every machine can exchange data with the others at once, each over its own connections.
  int rails() const;
};

/// The order in which elements are added: the balanced binary tree over the ranks, as in shared memory
/// (collectives/shm/kernels/reduce.h). A machine adds what forms a whole subtree of its own ranks, a partial sum; what is above
/// is added by whoever holds all partial sums. This is the only place where that order is decided.
struct SumOrder {
  /// The sum over ranks [first, last), which all are on `machine`.
  struct Partial {
    int machine;
    int first, last;
    int slot;  ///< its number among those of its machine
  };
  /// An addition of two of these, by number: the partial sums, and behind them the steps' results. The last is the
  /// total.
  struct Step {
    int left, right;
  };
  std::vector<Partial> partials;  ///< in the order of their ranks
  std::vector<Step> steps;
  std::vector<int> partials_of;  ///< each machine's number of partial sums

  static SumOrder over(const Layout& layout);
  /// Whether no partial sum is over several ranks.
  bool adds_nothing_within_machines() const;
};

}  // namespace lockstep::hierarchical_engine
