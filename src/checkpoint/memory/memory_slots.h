#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "checkpoint/memory/slot_memory.h"

namespace lockstep {

// Checkpoints in memory: a protocol by which ranks that may die at any instruction always leave one whole state.
//
// There are two slots. A save goes into the one that does not hold the newest state. State common to all ranks is one
// image, of which each rank writes a range; each rank's own state follows it. Every rank has a record in each slot. A
// rank saves in this order:
//
//   1. it waits until all ranks' records show that the previous save, in the other slot, is done;
//   2. it sets its record's sequence to 0: from now on this slot is not whole;
//   3. it writes its range of the common image and its own state;
//   4. it writes its record, and last the record's sequence.
//
// A slot is whole if the records of all its ranks are equal, sequence included. Because of 1, a rank begins to destroy
// a slot only when the other is whole; because of 3 and 4, a slot is whole only when all its data is written. Each
// record, range and own state has a single writer, so no locks are needed. In data-parallel training ranks hardly ever
// wait: a rank that has passed the next all_reduce knows that the others have saved.
//
// Each rank chooses its own range: readers need only the number of bytes, so any number of ranks can resume from a
// slot.
//
// On several machines each has such a memory. Every rank has a record in each of them, written by itself on its own
// machine and elsewhere by one rank of that machine (memory_machines.h), and 1 is an exchange between all ranks: a rank
// that has passed it knows that all of them have finished all their records of the previous save. So the save in hand
// goes over a slot of a machine only when the other slot is whole on every machine.
//
// Some storages of the image may lie in slices on the ranks, too large together for one machine. Each slice has its
// place in the image, the same on all machines, but only its rank's machine holds it, and the next machine a copy. The
// places of the others are holes that take no memory. In step 3 a rank also writes its slices, and those that it
// receives from the machine before; in step 4 it writes its record behind all of them. So a slot that is whole on a
// machine has all that this machine is to hold. Each record says whether its rank's slices are among that: `sliced`. A
// state can be resumed if the machines on which it is whole together hold the slices of all ranks. With one copy of
// each, on the next machine, that is so for the newest state that is whole everywhere, and stays so when any one
// machine is lost; two that are not neighbours may be lost, too. newest_resumable() makes this choice, and the first
// save of a start spares what it chose.

/// Describes a save; equal on all ranks.
struct SaveHeader {
  int64_t step = 0;
  uint64_t owner = 0;   ///< distinguishes the states of different Checkpointers
  uint64_t layout = 0;  ///< a hash of everything in the common image but the bytes of tensors
  uint64_t common_bytes = 0;
  bool operator==(const SaveHeader&) const = default;
};

struct WholeSlot {
  int slot = 0;
  uint64_t sequence = 0;  ///< of the save; later ones have higher numbers
  SaveHeader header;
  std::vector<uint64_t> own_bytes;  ///< by rank
  std::vector<bool> sliced;         ///< by rank: this memory holds its slices of the common image, if it has any

  /// Whether this memory alone has the whole state.
  bool has_all_slices() const { return std::find(sliced.begin(), sliced.end(), false) == sliced.end(); }
  int world_size() const { return static_cast<int>(own_bytes.size()); }
};

/// The slot and sequence of a save.
struct SlotTurn {
  int slot = 0;
  uint64_t sequence = 1;
};

std::optional<WholeSlot> whole_slot(const SlotMemory& memory, int slot);
/// All whole slots, newest first.
std::vector<WholeSlot> whole_slots(const SlotMemory& memory);

/// A state that is whole on a machine.
struct HeldState {
  uint64_t sequence = 0;
  std::vector<bool> sliced;  ///< as in the WholeSlot
};
/// The sequence of the state to resume from these machines: the newest that is whole on all of them; if there is none,
/// the newest on any. Its slices are all on the machines that hold it. 0: there is none.
uint64_t newest_resumable(const std::vector<std::vector<HeldState>>& machines);

/// Records the place on disk of `owner`'s states: the absolute path of a folder of checkpoints. A path that is too long
/// is not recorded.
/// REQUIRES: one rank per machine calls it, before the first save of a start.
void note_place(SlotMemory& memory, uint64_t owner, const std::string& folder);
/// The folder recorded for this owner; empty if none.
std::string place_of(const SlotMemory& memory, uint64_t owner);
/// The turn of the first save after a start of the ranks.
/// REQUIRES: one rank calls it while none saves, and tells the others.
SlotTurn first_turn(const SlotMemory& memory);

/// One rank's part in the protocol.
class SlotWriter {
 public:
  SlotWriter(SlotMemory& memory, int rank, int world_size, SlotTurn first)
      : memory_(memory), rank_(rank), world_size_(world_size), turn_(first) {}

  /// Where the save in hand, or the next one, goes.
  int slot() const { return turn_.slot; }
  /// A rank whose part of the last save is unfinished; -1 if there is none, and begin() may be called.
  int unfinished_rank() const;

  /// Begins a save: the slot is no longer whole.
  void begin();
  /// Called between begin() and finish(), in any order.
  void write_common(uint64_t at, const void* data, uint64_t bytes);
  void write_own(uint64_t at, const void* data, uint64_t bytes);
  /// Finishes this rank's part. `sliced`: this memory has its slices of the common image, or it has none anywhere.
  void finish(const SaveHeader& header, uint64_t own_bytes, bool sliced = true);

 private:
  SlotMemory& memory_;
  const int rank_;
  const int world_size_;
  SlotTurn turn_;                 // of the next save
  std::optional<SlotTurn> last_;  // this rank's last save
};

}  // namespace lockstep
