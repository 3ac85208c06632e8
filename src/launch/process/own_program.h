#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// The path of the program that this process executes, for executing it again: right also where it has been deleted or
/// replaced since.
std::string own_program();

/// This process's argv, from the program's name on.
std::vector<std::string> own_arguments();

/// This process's environment, as it is now.
EnvironmentBlock own_environment();

/// Starts this program again as the ranks of `--ranks`, as `lockstep run` would, and ends this process with its exit
/// code. Returns where the arguments do not ask for it. Throws Error where they do in a process that is a rank already:
/// `launcher` names who started it, and is empty otherwise.
void become_launcher_if_asked(const std::vector<std::string>& arguments, const std::string& launcher);

}  // namespace lockstep
