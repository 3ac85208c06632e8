#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <lockstep/group.h>

#include "checkpoint/checkpoint_part.h"
#include "checkpoint/format/checkpoint_folder.h"

namespace lockstep {

/// What was resumed.
struct ResumedCheckpoint {
  std::string path;
  int64_t step = 0;
};

/// Loads `parts` on all ranks from the newest intact checkpoint, which rank 0 chooses; empty where there is none.
/// Throws RefusedInput on all ranks, listing what does not fit on each.
std::optional<ResumedCheckpoint> resume_parts(const std::vector<CheckpointPart>& parts, const CheckpointFolder& folder,
                                              const Group& group);

}  // namespace lockstep
