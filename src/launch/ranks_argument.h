#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// A program's `--ranks N` (or --ranks=N, or auto), the other arguments about running the ranks, and the remaining
/// arguments.
struct RanksArgument {
  int ranks = 1;
  std::optional<std::chrono::milliseconds> hang_timeout;  ///< --hang-timeout S, or off
  std::optional<std::chrono::milliseconds> grace;         ///< --grace S
  std::vector<std::string> arguments;                     ///< starting with the program's name
};

/// Finds them before any "--". Empty if there is no --ranks: the other options are then the program's own. Throws
/// LaunchError (bad command line) if a value cannot be read, or an option is repeated.
std::optional<RanksArgument> find_ranks_argument(const std::vector<std::string>& arguments, int usable_cores);

}  // namespace lockstep
