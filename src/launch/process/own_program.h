#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// The path of the program that this process executes, for executing it again. Correct even if the file has been
/// deleted or replaced since.
std::string own_program();

/// This process's argv, starting with the program's name.
std::vector<std::string> own_arguments();

/// This process's current environment.
EnvironmentBlock own_environment();

/// If the arguments contain `--ranks`: starts this program again as ranks, as `lockstep run` would, and ends this
/// process with that exit code. Otherwise returns. Throws Error if they contain it in a process that is already a rank.
/// `launcher` names what started the process; empty if it is not a rank.
void become_launcher_if_asked(const std::vector<std::string>& arguments, const std::string& launcher);

}  // namespace lockstep
