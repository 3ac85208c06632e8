#pragma once

#include <fstream>
#include <string>

namespace lockstep::testing {

/// Seconds for which `task` of /proc, as in "thread-self", could have run while others had the cores.
inline double seconds_without_core(const std::string& task) {
  std::ifstream statistics("/proc/" + task + "/schedstat");
  double ran = 0, waited = 0;  // in nanoseconds
  statistics >> ran >> waited;
  return waited * 1e-9;
}

}  // namespace lockstep::testing
