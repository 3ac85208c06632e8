#pragma once

#include <chrono>
#include <string>

#include <c10/util/Exception.h>

#include "rank_page/rank_board.h"

namespace lockstep {

/// How long a rank that leaves a group waits for collectives that no thread waits for.
inline constexpr std::chrono::seconds kToFinish{5};

/// Tells the user, and the launcher, that a rank leaves a group in which such an operation did not complete.
inline void tell_unfinished(int rank, int world_size, const std::string& why, const std::string& more = "") {
  own_page().fail(RankFailure::kMismatch, -1, why);
  TORCH_WARN("rank ", rank, " of ", world_size,
             " leaves a group in which it never waited for an operation that did not complete: ", why, more,
             "\nCall wait() on every Work that an _async call returns: it throws this as an Error");
}

}  // namespace lockstep
