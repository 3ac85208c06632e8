#pragma once

namespace lockstep {

/// Obeys `--ranks N` among a program's arguments: does not return then, because the process becomes the launcher of the
/// ranks. Throws Error if this process is a rank already.
void start_ranks_if_asked(int argc, const char* const* argv);

}  // namespace lockstep
