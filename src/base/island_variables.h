#pragma once

#include <optional>
#include <string>

namespace lockstep {

/// What `lockstep run --islands` sets, as found in the process's environment.
struct IslandVariables {
  std::optional<std::string> lockstep_island;      ///< number/of@address:port,address:port of the hub
  std::optional<std::string> lockstep_island_key;  ///< the run's key

  static IslandVariables from_process();
};

}  // namespace lockstep
