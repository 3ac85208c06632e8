#pragma once

#include <string>

namespace lockstep {

/// Identifies the process that started this one and its siblings: the nearest ancestor whose environment lacks
/// `variable`, so that wrappers (a shell, a profiler) that inherited it do not count. The result, "pid-start time", is
/// equal for all siblings, and differs for any two such ancestors while this machine is up. Falls back to the parent if
/// an ancestor's environment is unreadable.
std::string starting_process(const std::string& variable);

}  // namespace lockstep
