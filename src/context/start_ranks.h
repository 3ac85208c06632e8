#pragma once

namespace lockstep {

/// Handles `--ranks N` among a program's arguments. Does not return in that case, because the process becomes the
/// launcher of the ranks. Throws Error if this process is already a rank.
void start_ranks_if_asked(int argc, const char* const* argv);

}  // namespace lockstep
