#pragma once

#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/missing_rank.h"
#include "launch/diagnosis/rank_end.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

/// All facts about the ranks of one start, from which they are judged at once. Complete when they have ended and the
/// rest of their output has been read; until then it holds the facts known so far.
struct Evidence {
  // The ranks' actions.
  std::vector<RankEnd> ends;  ///< in the order in which they were seen
  std::vector<RankView> ranks;
  int lost_ranks = 0;  ///< of lost machines

  // The reason why the launcher ended them although none had failed.
  std::optional<Stall> hang;
  std::optional<MissingRank> missing;

  // Requests to the launcher, and its own actions.
  int stop_signal = 0;                        ///< the first signal to the launcher
  std::optional<Clock::time_point> asked_at;  ///< when the ranks were asked to leave at a step of their choice
  bool asked_twice = false;
  bool told = false;       ///< a rank has read the request to leave
  bool signalled = false;  ///< the launcher has signalled the ranks to end

  /// Whether the ranks were asked to end: by a signal to the launcher or to a rank, or to continue with another number
  /// of ranks.
  bool was_asked_to_end() const { return stop_signal != 0 || asked_at; }
};

/// Whether a rank knows of a checkpoint on disk from `since` or later.
bool has_saved_since(const std::vector<RankView>& ranks, Clock::time_point since);

/// The end of a process whose dynamic loader misses a library, or of a shell that does not find a program.
inline constexpr ProcessEnd kNotFound{ProcessEnd::Kind::kExited, 127};

/// The library that the dynamic loader did not find, from the last lines of a rank that ended with kNotFound; empty if
/// they name none. Such a rank was never started.
std::string missing_library(const std::deque<std::string>& tail);

}  // namespace lockstep
