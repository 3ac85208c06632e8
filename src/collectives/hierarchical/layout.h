#pragma once

#include <string>
#include <vector>

namespace lockstep::hierarchical_engine {

/// The placement of a group's ranks on machines. Machines are numbered in the order of their first ranks.
struct Layout {
  int rank;
  std::vector<int> machine_of;          ///< each rank's machine
  std::vector<int> local_of;            ///< each rank's number among the ranks of its machine
  std::vector<std::vector<int>> ranks;  ///< on each machine, ascending

  static Layout of(int rank, const std::vector<std::string>& machines);

  int world_size() const { return static_cast<int>(machine_of.size()); }
  int machines() const { return static_cast<int>(ranks.size()); }
  int here() const { return machine_of[static_cast<size_t>(rank)]; }
  int local() const { return local_of[static_cast<size_t>(rank)]; }
  int ranks_on(int machine) const { return static_cast<int>(ranks[static_cast<size_t>(machine)].size()); }
  int most_on_a_machine() const;  ///< ranks
  /// The rank of a machine that serves rail `rail`: the local rank `rail` modulo the machine's number of ranks.
  int on_rail(int machine, int rail) const {
    return ranks[static_cast<size_t>(machine)][static_cast<size_t>(rail % ranks_on(machine))];
  }
  /// The number of ranks of each machine that can exchange data with the others at once, each over its own connections.
  int rails() const;
};

/// The order in which elements are added: the balanced binary tree over the ranks, as in shared memory
/// (collectives/shm/kernels/reduce.h). A machine adds each whole subtree of its own ranks into a partial sum; the
/// holder of all partial sums adds the rest. This is the only place that decides the order.
struct SumOrder {
  /// The sum over ranks [first, last), all on `machine`.
  struct Partial {
    int machine;
    int first, last;
    int slot;  ///< its number among those of its machine
  };
  /// An addition of two operands, by number: the partial sums come first, then the results of steps. The last is the
  /// total.
  struct Step {
    int left, right;
  };
  std::vector<Partial> partials;  ///< in the order of their ranks
  std::vector<Step> steps;
  std::vector<int> partials_of;  ///< each machine's number of partial sums
  /// Each machine has one partial sum, and these are added along the balanced tree over the machines.
  bool is_tree_over_machines = false;

  static SumOrder over(const Layout& layout);
  /// Whether every partial sum is of one rank.
  bool adds_nothing_within_machines() const;
};

}  // namespace lockstep::hierarchical_engine
