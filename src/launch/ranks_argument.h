#pragma once

#include <optional>
#include <string>
#include <vector>

namespace lockstep {

/// A program's `--ranks N` (or --ranks=N, or auto), and the arguments without it.
struct RanksArgument {
  int ranks = 1;
  std::vector<std::string> arguments;  ///< from the program's name on
};

/// Looks for it up to a "--". Empty where there is none; throws LaunchError (bad command line) where its value is no
/// number of ranks, or it comes twice.
std::optional<RanksArgument> find_ranks_argument(const std::vector<std::string>& arguments, int usable_cores);

}  // namespace lockstep
