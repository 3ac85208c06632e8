#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "checkpoint/memory/image_slices.h"
#include "checkpoint/memory/memory_slots.h"
#include "checkpoint/object_writer.h"

namespace lockstep {

/// Checkpoints in memory on several machines. Each machine holds a whole copy of the state, so that any machine may be
/// lost with its memory: its ranks write the common image among themselves, and each also keeps the records and own
/// states of some ranks of the other machines. A save has the same sequence everywhere, and begins with an exchange of
/// own states. So a rank that begins to write knows that the previous save is whole on every machine, and some sequence
/// always is.
///
/// State that lies in slices on the ranks is on two machines: that of its rank, and the next one in the order of their
/// first ranks, after the last the first. Each rank sends its slices to a rank there, piece by piece.
class MemoryMachines {
 public:
  /// `first_ranks` has, for each rank, the first rank of its machine. `rank` is this rank.
  MemoryMachines(std::vector<int> first_ranks, int rank);

  bool several() const { return several_; }
  /// The number of ranks of this machine, and this rank's number among them.
  int ranks_here() const { return ranks_here_; }
  int rank_here() const { return rank_here_; }
  /// Whether the machine of rank `on` holds the slices of `rank`.
  bool holds_slices(int on, int rank) const;
  /// The ranks of the machine before whose slices this rank receives.
  const std::vector<int>& sources() const { return sources_; }
  /// Whether this rank represents its machine.
  bool leads() const { return first_ranks_[static_cast<size_t>(rank_)] == rank_; }

  // For saves, in this order. On one machine these do nothing.

  /// Called before the first save of a start, which goes to `turn`.
  void begin_keeping(SlotMemory& memory, SlotTurn turn);
  /// Exchanges the ranks' own states and the hashes of their layouts. Afterwards all ranks have finished the previous
  /// save.
  /// REQUIRES: all ranks call it.
  void exchange(const Group& group, const ObjectWriter& own, uint64_t layout);
  /// Sends this rank's slices to the next machine, and writes those received into the common image. `mine`: uint8
  /// tensors, as many as `slices` has of this rank.
  /// REQUIRES: all ranks call it, between begin() and finish() of `writer`.
  void exchange_slices(const Group& group, const std::vector<at::Tensor>& mine, const ImageSlices& slices,
                       SlotWriter& writer) const;
  /// Writes the states received for the ranks that this rank keeps, in a save equal to `mine` except for the layouts.
  void keep(const SaveHeader& mine);

  // For starts.

  /// The turn of the first save of a start on each machine.
  /// REQUIRES: all ranks call it, while none saves.
  static SlotTurn agree_on_turn(const Group& group, const SlotMemory& memory);
  /// The state that newest_resumable() chooses. What is not in slices is sent to the machines that lack it. Empty if
  /// there is none, or it cannot be sent (rank 0 warns). `mine`: this machine's states, empty unless leads().
  /// REQUIRES: all ranks call it, while none saves.
  std::optional<WholeSlot> newest_for_all(const Group& group, SlotMemory& memory,
                                          const std::vector<WholeSlot>& mine) const;

 private:
  std::vector<int> ranks_of(int first_rank) const;
  std::string send(const Group& group, SlotMemory& memory, int root, bool receives, WholeSlot& slot) const;

  const std::vector<int> first_ranks_;
  const int rank_;
  std::vector<int> machines_;  // their first ranks, in order
  std::vector<int> sources_;
  int destination_ = -1;  // the rank that receives this one's slices
  bool several_ = false;
  int ranks_here_ = 1, rank_here_ = 0;
  std::vector<int> kept_;            // ranks of other machines for which this rank writes records and own states
  std::vector<SlotWriter> writers_;  // for them
  std::vector<std::string> told_;    // by rank; received in the current save
};

}  // namespace lockstep
