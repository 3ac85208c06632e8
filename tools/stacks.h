#pragma once

#include <sys/types.h>

#include <chrono>

namespace lockstep {

/// The longest time that a process is stopped while its stacks are read.
constexpr std::chrono::seconds kLongestStop(5);

/// Prints the stacks of all threads of a process of this machine. Returns false if that failed, at least in part, after
/// printing the reason. Throws LaunchError (not started) if there is no program that can do it.
bool print_stacks(pid_t pid);

}  // namespace lockstep
