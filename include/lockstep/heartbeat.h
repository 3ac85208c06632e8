#pragma once

#include <lockstep/cxx20.h>

namespace lockstep {

/// Says that this rank is making progress while others wait for it. Call it during long work in which this rank mostly
/// waits itself, such as a download or access to a slow file system. Do not call it from a separate thread, which would
/// keep beating during a hang. `lockstep run` ends the run when no rank has computed, communicated or called this for
/// `--hang-timeout`; a rank that computes need not call it. The others' wait is still bounded by
/// ContextOptions::collective_timeout. Takes nanoseconds and does not communicate; without such a launcher it does
/// nothing. May be called from any thread, with or without a Context.
void heartbeat();

}  // namespace lockstep
