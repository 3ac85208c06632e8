#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// A program's `--ranks N` (or --ranks=N, or auto), what it says beside that of how the ranks are to be run, and the
/// arguments without all that.
struct RanksArgument {
  int ranks = 1;
  std::optional<std::chrono::milliseconds> hang_timeout;  ///< --hang-timeout S, or off
  std::optional<std::chrono::milliseconds> grace;         ///< --grace S
  std::vector<std::string> arguments;                     ///< from the program's name on
};

/// Looks for it up to a "--". Empty where there is no --ranks: the others are the program's own then. Throws
/// LaunchError (bad command line) where a value cannot be read, or an option comes twice.
std::optional<RanksArgument> find_ranks_argument(const std::vector<std::string>& arguments, int usable_cores);

}  // namespace lockstep
