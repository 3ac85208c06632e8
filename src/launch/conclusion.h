#pragma once

#include <vector>

#include "launch/run_state.h"

namespace lockstep {

/// Whether a rank knows of a checkpoint on disk that is no older.
bool has_saved_since(const std::vector<RankView>& ranks, Clock::time_point since);

}  // namespace lockstep
