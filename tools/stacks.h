#pragma once

#include <sys/types.h>

#include <chrono>

namespace lockstep {

/// No process stands still for longer while its stacks are read.
constexpr std::chrono::seconds kLongestStop(5);

/// Prints the stacks of all threads of a process of this machine; false: that was not possible, or not all, and it was
/// said why. Throws LaunchError (not started) where there is no program that can.
bool print_stacks(pid_t pid);

}  // namespace lockstep
