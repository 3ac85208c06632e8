#pragma once

#include <string>
#include <vector>

namespace lockstep {

/// The folders of this user's runs whose launchers run on this machine, sorted. A launcher keeps the lock of its run's
/// folder open, so that it is found by /proc, and nothing has to be registered anywhere.
std::vector<std::string> folders_of_running_runs();

}  // namespace lockstep
