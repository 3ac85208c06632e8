#pragma once

#include <sys/types.h>

#include <vector>

#include "base/clock.h"

namespace lockstep {

/// The state of a process as in /proc/<pid>/stat; 0 if there is no such process.
char process_state(pid_t pid);

/// Whether a process group has a member that is not a zombie. Inspects every process of the machine.
bool group_lives(pid_t group);

/// The processes whose processor time is summed.
struct ProcessFamily {
  pid_t group = 0;
  pid_t member = 0;  ///< a process that belongs to the family whatever its group; 0: none
};

/// The processor time that each family has used: all threads of its processes, of their children, and of children they
/// waited for. Shrinks when a process ends for which no family member waits. Inspects every process of the machine,
/// once.
std::vector<Clock::duration> processor_times(const std::vector<ProcessFamily>& families);

}  // namespace lockstep
