#pragma once

#include <sys/types.h>

#include <vector>

#include "base/clock.h"

namespace lockstep {

/// The state of a process as in /proc/<pid>/stat; 0 where there is none to be seen.
char process_state(pid_t pid);

/// Whether a process group has a member that is no zombie. Looks at every process of the machine.
bool group_lives(pid_t group);

/// Whose processor time is asked for.
struct ProcessFamily {
  pid_t group = 0;   ///< a process group
  pid_t member = 0;  ///< a process that belongs to it wherever it went; 0: none is known
};

/// The processor time that each family has used: all threads of its processes, of what they have started, and of what
/// they have waited for. Less than before where one has ended that nobody of the family waited for. Looks at every
/// process of the machine, once.
std::vector<Clock::duration> processor_times(const std::vector<ProcessFamily>& families);

}  // namespace lockstep
