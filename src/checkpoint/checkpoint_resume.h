#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "checkpoint/accumulation.h"
#include "checkpoint/checkpoint_part.h"
#include "checkpoint/format/checkpoint_folder.h"
#include "checkpoint/memory_tier.h"

namespace lockstep {

struct ResumedCheckpoint {
  std::string path;  ///< empty: it was in memory
  int64_t step = 0;
  int64_t step_on_disk = 0;  ///< of the newest in the folder; 0: none
  AccumulationCheck accumulation = {};
};

/// Loads `parts` on all ranks from the newest intact checkpoint in memory (null: no such tier) or in the folder, chosen
/// by rank 0. Empty if none. Throws RefusedInput on all ranks, listing the mismatches on each.
std::optional<ResumedCheckpoint> resume_parts(const std::vector<CheckpointPart>& parts, const CheckpointFolder& folder,
                                              const MemoryTier* memory, const Group& group);

}  // namespace lockstep
