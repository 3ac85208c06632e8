#pragma once

#include <string>
#include <vector>

#include "base/clock.h"
#include "launch/diagnosis/stall.h"

namespace lockstep {

// Phrases for the launcher's messages.

/// "SIGTERM".
std::string signal_name(int signal);
/// "1.5 s".
std::string in_seconds(Clock::duration time);
/// "3 ranks".
std::string counted_ranks(int ranks);
/// "1 restart", "2 restarts and 1 resize"; empty if none.
std::string earlier_starts(int restarts, int resizes);
/// Each of its lines on a new line, indented.
std::string list_lines(const Stall& stall);
/// How long the waiting ranks will wait.
std::string patience_text(const std::vector<RankView>& ranks);

}  // namespace lockstep
