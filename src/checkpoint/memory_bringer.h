#pragma once

#include <string>
#include <vector>

#include <lockstep/group.h>

#include "checkpoint/checkpoint_part.h"
#include "checkpoint/memory/image_slices.h"
#include "checkpoint/memory/slot_memory.h"
#include "checkpoint/slot_reader.h"

namespace lockstep {

/// The parts of an open slot's partial storages that `parts` use on this rank, as ranges of the common image.
std::vector<ByteRange> ranges_to_load(const std::vector<CheckpointPart>& parts, const OpenSlot& open);

/// Fills these ranges of the partial storages: from this machine's memory, or, if it lacks a slice, piece by piece from
/// a rank whose machine has it. `problem`: why this rank cannot; "" if it can. Throws RefusedInput on all ranks if one
/// cannot, or a slice is on no machine.
/// REQUIRES: all ranks call it, with the same state open, while none saves.
void bring_ranges(const Group& group, const SlotMemory& memory, const OpenSlot& open,
                  const std::vector<ByteRange>& ranges, std::string problem);

}  // namespace lockstep
