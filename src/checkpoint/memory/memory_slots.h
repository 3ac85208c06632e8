#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/memory/slot_memory.h"

namespace lockstep {

// Checkpoints in memory: how ranks that may die at any instruction always leave one whole state.
//
// There are two slots. A save goes into the one that does not hold the newest state. What ranks have in common is one
// image of which each rank writes a range; behind it lies what each rank has of its own. Every rank has a record in
// each slot. A rank saves in this order:
//
//   1. it waits until the records of all ranks say that the save before, in the other slot, is done;
//   2. it sets its record's sequence to 0: from here on this slot is not whole;
//   3. it writes its range of the common image and its own state;
//   4. it writes what the record says, and last its sequence.
//
// A slot is whole if the records of all its ranks have the same sequence and say the same. Because of 1, a rank begins
// to destroy a slot only when the other one is whole, and because of 3 and 4 a slot is whole only when all data lie in
// it. Only its rank writes a record, a range and an own state, so there is nothing to lock. In data-parallel training
// nobody really waits: a rank that has passed the next all_reduce knows that the others have saved.
//
// Which range a rank writes is its own affair: readers need the number of bytes alone, so any number of ranks can go on
// from a slot.

/// Describes a save; equal on all ranks.
struct SaveHeader {
  int64_t step = 0;
  uint64_t owner = 0;   ///< tells the states of one Checkpointer from those of another
  uint64_t layout = 0;  ///< a hash of everything in the common image but the bytes of tensors
  uint64_t common_bytes = 0;
  bool operator==(const SaveHeader&) const = default;
};

struct WholeSlot {
  int slot = 0;
  uint64_t sequence = 0;  ///< of the save; later ones have higher numbers
  SaveHeader header;
  std::vector<uint64_t> own_bytes;  ///< by rank

  int world_size() const { return static_cast<int>(own_bytes.size()); }
};

/// Which slot a save goes into.
struct SlotTurn {
  int slot = 0;
  uint64_t sequence = 1;
};

/// The slot, if it is whole.
std::optional<WholeSlot> whole_slot(const SlotMemory& memory, int slot);
/// All that are whole, newest first.
std::vector<WholeSlot> whole_slots(const SlotMemory& memory);
/// Notes where on disk the states of `owner` belong: a folder of checkpoints, from the root on. One rank of a machine
/// calls it, before the first save of a start. A path that is too long is not noted.
void note_place(SlotMemory& memory, uint64_t owner, const std::string& folder);
/// The place noted for this owner; empty if none.
std::string place_of(const SlotMemory& memory, uint64_t owner);
/// For the first save after a start of the ranks. One rank calls it while none saves, and tells the others.
SlotTurn first_turn(const SlotMemory& memory);

/// One rank's part of the protocol, from its start on.
class SlotWriter {
 public:
  SlotWriter(SlotMemory& memory, int rank, int world_size, SlotTurn first)
      : memory_(memory), rank_(rank), world_size_(world_size), turn_(first) {}

  /// A rank whose part of the last save is not done; -1 if there is none, and begin() may be called.
  int unfinished_rank() const;

  /// The slot is not whole from here on.
  void begin();
  /// Between begin() and finish(), in any order.
  void write_common(uint64_t at, const void* data, uint64_t bytes);
  void write_own(uint64_t at, const void* data, uint64_t bytes);
  /// This rank's part is done.
  void finish(const SaveHeader& header, uint64_t own_bytes);

 private:
  SlotMemory& memory_;
  const int rank_;
  const int world_size_;
  SlotTurn turn_;                 // of the next save
  std::optional<SlotTurn> last_;  // what this rank saved last
};

}  // namespace lockstep
