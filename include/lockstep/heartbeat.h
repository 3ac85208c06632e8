#pragma once

#include <lockstep/cxx20.h>

namespace lockstep {

/// Reports that this rank makes progress while others wait for it. Call it during long work in which this rank mostly
/// waits, such as a download or access to a slow file system; a rank that computes need not call it. Do not call it
/// from a separate thread, which would continue during a hang. `lockstep run` ends the run when no rank has computed,
/// communicated or called heartbeat() for `--hang-timeout`. ContextOptions::collective_timeout still bounds the others'
/// wait. Takes nanoseconds and does not communicate; without such a launcher it does nothing. May be called from any
/// thread, with or without a Context.
void heartbeat();

}  // namespace lockstep
