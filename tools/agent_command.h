#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// `lockstep agent`, which `lockstep run` starts on each machine: returns the exit code, throws LaunchError.
int agent_command(const std::vector<std::string>& words, const EnvironmentBlock& environment);

}  // namespace lockstep
