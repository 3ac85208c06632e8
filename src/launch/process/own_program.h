#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// The path of the program that this process executes, for executing it again. Correct even if it has been deleted or
/// replaced since.
std::string own_program();

/// This process's argv, from the program's name on.
std::vector<std::string> own_arguments();

/// This process's environment, as it is now.
EnvironmentBlock own_environment();

/// If the arguments have `--ranks`: starts this program again as ranks, as `lockstep run` would, and ends this process
/// with that exit code. Otherwise returns. Throws Error if they have it in a process that is already a rank: `launcher`
/// names what started it, and is empty otherwise.
void become_launcher_if_asked(const std::vector<std::string>& arguments, const std::string& launcher);

}  // namespace lockstep
