#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// `lockstep run` with the words after it. Returns the exit code; throws LaunchError.
int run_command(std::vector<std::string> words, const EnvironmentBlock& environment);

/// `lockstep agent`, which `lockstep run` starts on each machine. Returns the exit code; throws LaunchError.
int agent_command(const std::vector<std::string>& words, const EnvironmentBlock& environment);

}  // namespace lockstep
