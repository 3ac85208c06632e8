#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

namespace lockstep::diloco {

/// Where the ranks of a group are, and which of them exchange what. A machine is the ranks of one replicated model. The
/// rank `i` of each machine's model forms a rail with the ranks `i` of all others: it owns slice `i` of every fragment.
/// There are as many slices as the machine with the fewest ranks has; further ranks own nothing.
class Machines {
 public:
  /// Every rank of `all` makes it. `model`: the group of the replicas of this rank's machine. Throws Error on all ranks
  /// if one of these groups has ranks of several machines, or ranks that are not in `all`, and if `all` is one machine
  /// of a run that has more ranks.
  /// `island`: the number of the one machine of a run under `lockstep run --islands`.
  Machines(const Group& all, const Group& model, std::optional<int> island = std::nullopt);

  const Group& all() const { return all_; }
  const Group& here() const { return here_; }
  /// The ranks with this rank's slice, one for each machine.
  /// REQUIRES: this rank owns a slice.
  const Group& rail() const { return *rail_; }

  int count() const { return static_cast<int>(ranks_.size()); }
  /// The number of this rank's machine; machines are numbered in the order of their first ranks.
  int own() const { return own_; }
  int slices() const { return slices_; }
  bool owns_slice() const { return here_.rank() < slices_; }
  /// The rank of a machine in this rank's rail.
  int in_rail(int machine) const { return in_rail_[static_cast<size_t>(machine)]; }
  /// Numbers in all(): of the rank `of` of here(), and of the first rank of a machine's model.
  int number_of(int of) const { return ranks_[static_cast<size_t>(own_)][static_cast<size_t>(of)]; }
  /// Warns that the machine did something, on rank 0 and on the machine's first rank.
  void warn_of(int machine, const std::string& what) const;
  int first_rank(int machine) const { return ranks_[static_cast<size_t>(machine)].front(); }
  /// The ranks in all() of each machine, each followed by -1.
  std::vector<int64_t> layout() const;
  /// "machine 1 (ranks 2, 3)"
  std::string name_of(int machine) const;
  /// "rank 2", "rank 0 of machine 1": the first rank of a machine's model.
  std::string name_of_first_rank(int machine) const;

 private:
  const Group all_, here_;
  const std::optional<int> island_;
  std::vector<std::vector<int>> ranks_;  ///< by machine, in the order of its model's ranks
  std::optional<Group> rail_;
  std::vector<int> in_rail_;
  int own_ = 0, slices_ = 0;
};

}  // namespace lockstep::diloco
