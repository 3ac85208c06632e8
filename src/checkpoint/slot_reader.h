#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "checkpoint/checkpoint_image.h"
#include "checkpoint/memory/memory_slots.h"

namespace lockstep {

/// Reads the ranks' states in the launcher's memory.
/// REQUIRES: `memory` outlives it and the images.
class SlotReader {
 public:
  /// `owner` selects the states to read.
  SlotReader(const SlotMemory& memory, uint64_t owner) : memory_(memory), owner_(owner) {}

  /// The newest states that are whole and readable, at most `most`. Warns of states that cannot be read.
  std::vector<WholeSlot> intact(size_t most) const;
  /// The contents of the slot with that sequence. Throws RefusedInput if it is not whole.
  CheckpointImage image(uint64_t sequence) const;

 private:
  std::string problem_of(const WholeSlot& slot) const;

  const SlotMemory& memory_;
  const uint64_t owner_;
};

}  // namespace lockstep
