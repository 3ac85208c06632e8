#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// `lockstep run`, with the words behind it: returns the exit code, throws LaunchError.
int run_command(std::vector<std::string> words, const EnvironmentBlock& environment);

}  // namespace lockstep
