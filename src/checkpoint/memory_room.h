#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/memory/image_slices.h"
#include "checkpoint/memory/mapped_slots.h"
#include "checkpoint/memory_machines.h"

namespace lockstep {

/// The parts of the launcher's memory that this rank may write, in both slots: its ranges of the image common to all
/// ranks of the machine, and its own state.
class MemoryRoom {
 public:
  MemoryRoom(MappedSlots& memory, int rank, const MemoryMachines& machines)
      : memory_(memory), rank_(rank), machines_(machines) {}

  /// The memory that a save takes.
  struct Sizes {
    uint64_t common_bytes = 0;
    uint64_t own_bytes = 0;
    ImageSlices slices = {};  ///< of the common image
  };
  /// Writes the memory that this rank requests into `message`.
  void ask(CheckpointMessage& message, const Sizes& sizes) const;
  /// Throws LimitError, with the memory requested by all ranks and the memory available, if that is too little on a
  /// machine.
  static void check(const std::vector<CheckpointMessage>& ranks, const MemoryMachines& machines);

  /// Makes room for images of this size, and some more. Throws LimitError.
  void open(const Sizes& sizes);
  void open_own(uint64_t own_bytes);
  /// Whether a common image that takes at most `most_bytes` has room. The same on all ranks.
  bool has_room(uint64_t most_bytes, const ImageSlices& slices) const;

  uint64_t common_capacity() const { return common_capacity_; }  ///< of the whole common image; equal on all ranks
  uint64_t own_capacity() const { return own_capacity_; }
  /// The ranges of a common image that this rank writes, in the order of the image. There must be room for it.
  std::vector<ByteRange> share(const ImageSlices& slices) const;
  /// Frees what no rank of this machine writes in that slot. Call it once for each slot after open(), between begin()
  /// and finish() of a save, on one rank of the machine.
  void release_others(int slot, const ImageSlices& slices);

 private:
  std::vector<ByteRange> received(const ImageSlices& slices) const;

  MappedSlots& memory_;
  const int rank_;
  const MemoryMachines& machines_;
  uint64_t common_capacity_ = 0, own_capacity_ = 0;
  ImageSlices slices_;  ///< when room was made
};

}  // namespace lockstep
