#pragma once

#include <vector>

#include "checkpoint/checkpoint_part.h"

namespace lockstep {

/// After a save of these parts: warns of each object whose state the training uses and no part keeps, with the line
/// that adds it. A resumed run would begin that state anew. Warns of an object once.
void warn_of_forgotten_parts(const std::vector<CheckpointPart>& parts);

}  // namespace lockstep
