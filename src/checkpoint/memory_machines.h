#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "checkpoint/memory/memory_slots.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// Where a run has several machines, each has memory of its own for checkpoints, and in it a whole copy of the state,
/// so that a machine may be lost with its memory: its ranks write the common image among themselves, and each of them
/// keeps the records and own states of some ranks of the other machines beside its own. A save has the same sequence
/// everywhere, and each begins with an exchange of own states, so a rank that begins to write knows that the save
/// before is whole on every machine; so is then always one of the same sequence.
class MemoryMachines {
 public:
  /// `first_ranks`: by rank, the first rank of its machine. `rank`: this one.
  MemoryMachines(std::vector<int> first_ranks, int rank);

  bool several() const { return several_; }
  /// The ranks of this machine, and this one's number among them.
  int ranks_here() const { return ranks_here_; }
  int rank_here() const { return rank_here_; }
  /// Whether this rank speaks for its machine.
  bool leads() const { return first_ranks_[static_cast<size_t>(rank_)] == rank_; }

  // For saves, in this order; on one machine they do nothing.

  /// Before the first save of a start, which goes to `turn`.
  void begin_keeping(SlotMemory& memory, SlotTurn turn);
  /// Ranks tell each other what they have of their own, and the hashes of their layouts. All ranks call it; afterwards
  /// all have done with the save before.
  void exchange(const Group& group, const ObjectWriter& own, uint64_t layout);
  /// Writes here what was told of the ranks that this one keeps, in a save that is `mine` but for the layouts.
  void keep(const SaveHeader& mine);

  // For starts.

  /// Where the first save of a start goes on each machine. All ranks call it, while none saves.
  static SlotTurn agree_on_turn(const Group& group, const SlotMemory& memory);
  /// The newest state that every machine has; where none is on all, the newest of any, which those that lack it are
  /// sent. Empty where there is none, or it cannot be sent (rank 0 warns). `mine`: what this machine has, empty unless
  /// leads(). All ranks call it, while none saves.
  std::optional<WholeSlot> newest_for_all(const Group& group, SlotMemory& memory,
                                          const std::vector<WholeSlot>& mine) const;

 private:
  std::string send(const Group& group, SlotMemory& memory, int root, bool receives, WholeSlot& slot) const;

  const std::vector<int> first_ranks_;
  const int rank_;
  bool several_ = false;
  int ranks_here_ = 1, rank_here_ = 0;
  std::vector<int> kept_;            // ranks of other machines, whose records and own states this one writes here
  std::vector<SlotWriter> writers_;  // for them
  std::vector<std::string> told_;    // by rank; in the save at hand
};

}  // namespace lockstep
