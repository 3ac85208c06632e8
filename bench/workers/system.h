#pragma once

#include <string>
#include <vector>

namespace lockstep::bench {

/// A competitor: how its worker is started on all ranks, and with which settings.
struct System {
  std::string name;
  std::vector<std::string> command;      ///< the worker's socket is appended
  std::vector<std::string> environment;  ///< NAME=value, on top of this process's
  std::string settings;                  ///< in words, for whoever reads the figures
  std::string missing;                   ///< why it cannot be started here; empty if it can
};

}  // namespace lockstep::bench
