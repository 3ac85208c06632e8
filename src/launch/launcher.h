#pragma once

#include "launch/plan.h"
#include "launch/process/team.h"

namespace lockstep {

/// Implements `lockstep run`: starts the ranks, serves their key-value store, forwards and keeps their output, and
/// stops all when one fails or a signal requests it. Returns the exit code (see ExitCode) when no process of the run is
/// left. `environment` is the launcher's own; `places` starts the ranks elsewhere. Throws LaunchError if the ranks
/// cannot be started.
///
/// REQUIRES: the process has no other thread. The function takes over signals, and children are bound to the thread
/// that started them.
int launch(const LaunchOptions& options, const EnvironmentBlock& environment, RankPlaces* places = nullptr);

}  // namespace lockstep
