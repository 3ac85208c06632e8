#pragma once

#include <sys/types.h>

#include <chrono>
#include <string>
#include <vector>

namespace lockstep {

/// The numbers of all processes that /proc shows, in ascending order.
std::vector<pid_t> all_processes();

/// The living processes started with `variable`, a whole "NAME=value", in their environment, even if they have since
/// moved to another group, session or parent. Does not see other users' processes. A process in the middle of an exec
/// shows only part of its environment or none; it is checked again until it shows one or has ended, for up to
/// `patience`, after which it does not count. Inspects every process of the machine.
std::vector<pid_t> processes_with(const std::string& variable,
                                  std::chrono::milliseconds patience = std::chrono::milliseconds(500));

/// Whether a process was started with a variable of this name. Checks again in the same way while the process is in an
/// exec.
bool was_started_with(pid_t pid, const std::string& name,
                      std::chrono::milliseconds patience = std::chrono::milliseconds(500));

}  // namespace lockstep
