#pragma once

#include <sys/types.h>

namespace lockstep {

/// Prints the stacks of all threads of a process of this machine; false: that was not possible, and it was said why.
/// Throws LaunchError (not started) where there is no program that can.
bool print_stacks(pid_t pid);

}  // namespace lockstep
