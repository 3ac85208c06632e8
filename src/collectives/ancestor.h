#pragma once

#include <string>

namespace lockstep {

/// Identifies the process that started this one and its siblings: the nearest ancestor whose environment lacks
/// `variable`, so that wrappers (a shell, a profiler) that inherited it do not count. The same for all siblings,
/// and different for any two such ancestors while this machine is up ("pid-start time").
/// Falls back to the parent where an ancestor's environment may not be read.
std::string starting_process(const std::string& variable);

}  // namespace lockstep
