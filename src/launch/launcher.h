#pragma once

#include "launch/plan.h"
#include "launch/process/team.h"

namespace lockstep {

/// `lockstep run`: starts the ranks, serves their key-value store, passes on and keeps their output, and stops all
/// when one fails or a signal asks for it. Returns the exit code (see ExitCode) when no process of the run is left.
/// `environment` is the launcher's own; `places` start the ranks elsewhere. Throws LaunchError when the ranks cannot be
/// started.
///
/// Call it from a process's only thread: it takes over signals, and children are bound to the thread that started them.
int launch(const LaunchOptions& options, const EnvironmentBlock& environment, RankPlaces* places = nullptr);

}  // namespace lockstep
