#pragma once

#include <string>
#include <string_view>
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

inline constexpr std::string_view kSystems[] = {"shm", "gloo", "mpich", "openmpi", "openmpi-debian", "impi"};

/// `build` is the build folder; `cores` are those this process may use. Throws std::invalid_argument on another name.
System make_system(std::string_view name, const std::string& build, int ranks, int cores);

}  // namespace lockstep::bench
