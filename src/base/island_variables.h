#pragma once

#include <optional>
#include <string>

namespace lockstep {

/// What `lockstep run --islands` sets, as found in the process's environment.
struct IslandVariables {
  std::optional<std::string> lockstep_island;  ///< number/of@name of the agent's socket

  static IslandVariables from_process();
};

}  // namespace lockstep
