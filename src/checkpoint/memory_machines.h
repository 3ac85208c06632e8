#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "checkpoint/memory/memory_slots.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// Checkpoints in memory on several machines. Each machine holds a whole copy of the state, so that any machine may be
/// lost with its memory: its ranks write the common image among themselves, and each also keeps the records and own
/// states of some ranks of the other machines. A save has the same sequence everywhere, and begins with an exchange of
/// own states. So a rank that begins to write knows that the previous save is whole on every machine, and some sequence
/// always is.
class MemoryMachines {
 public:
  /// `first_ranks` has, for each rank, the first rank of its machine. `rank` is this rank.
  MemoryMachines(std::vector<int> first_ranks, int rank);

  bool several() const { return several_; }
  /// The number of ranks of this machine, and this rank's number among them.
  int ranks_here() const { return ranks_here_; }
  int rank_here() const { return rank_here_; }
  /// Whether this rank represents its machine.
  bool leads() const { return first_ranks_[static_cast<size_t>(rank_)] == rank_; }

  // For saves, in this order. On one machine these do nothing.

  /// Called before the first save of a start, which goes to `turn`.
  void begin_keeping(SlotMemory& memory, SlotTurn turn);
  /// Exchanges the ranks' own states and the hashes of their layouts. Afterwards all ranks have finished the previous
  /// save.
  /// REQUIRES: all ranks call it.
  void exchange(const Group& group, const ObjectWriter& own, uint64_t layout);
  /// Writes the states received for the ranks that this rank keeps, in a save equal to `mine` except for the layouts.
  void keep(const SaveHeader& mine);

  // For starts.

  /// The turn of the first save of a start on each machine.
  /// REQUIRES: all ranks call it, while none saves.
  static SlotTurn agree_on_turn(const Group& group, const SlotMemory& memory);
  /// The newest state that every machine has; if no state is on all, the newest of any, which is sent to the machines
  /// that lack it. Empty if none, or it cannot be sent (rank 0 warns). `mine` holds this machine's states, and is empty
  /// unless leads().
  /// REQUIRES: all ranks call it, while none saves.
  std::optional<WholeSlot> newest_for_all(const Group& group, SlotMemory& memory,
                                          const std::vector<WholeSlot>& mine) const;

 private:
  std::string send(const Group& group, SlotMemory& memory, int root, bool receives, WholeSlot& slot) const;

  const std::vector<int> first_ranks_;
  const int rank_;
  bool several_ = false;
  int ranks_here_ = 1, rank_here_ = 0;
  std::vector<int> kept_;            // ranks of other machines for which this rank writes records and own states
  std::vector<SlotWriter> writers_;  // for them
  std::vector<std::string> told_;    // by rank; received in the current save
};

}  // namespace lockstep
