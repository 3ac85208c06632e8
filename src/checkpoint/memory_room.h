#pragma once

#include <cstdint>
#include <vector>

#include "checkpoint/checkpoint_message.h"
#include "checkpoint/memory/mapped_slots.h"

namespace lockstep {

/// The parts of the launcher's memory that this rank may write, in both slots: its range of the image common to all
/// ranks of the machine, and its own state.
class MemoryRoom {
 public:
  /// `rank_here` and `ranks_here` refer to this machine.
  MemoryRoom(MappedSlots& memory, int rank, int rank_here, int ranks_here)
      : memory_(memory), rank_(rank), rank_here_(rank_here), ranks_here_(ranks_here) {}

  /// Writes the memory that this rank requests into `message`.
  void ask(CheckpointMessage& message, uint64_t common_bytes, uint64_t own_bytes) const;
  /// Throws LimitError, with the memory requested by all ranks and the memory available, if that is too little.
  static void check(const std::vector<CheckpointMessage>& ranks);

  /// Makes room for images of this size, and some more. Throws LimitError.
  void open(uint64_t common_bytes, uint64_t own_bytes);
  void open_own(uint64_t own_bytes);

  uint64_t common_capacity() const { return common_capacity_; }  ///< of the whole common image; equal on all ranks
  uint64_t own_capacity() const { return own_capacity_; }
  /// This rank's range of the common image.
  uint64_t begin() const { return begin_; }
  uint64_t end() const { return end_; }

 private:
  MappedSlots& memory_;
  const int rank_, rank_here_, ranks_here_;
  uint64_t common_capacity_ = 0, own_capacity_ = 0;
  uint64_t begin_ = 0, end_ = 0;
};

}  // namespace lockstep
