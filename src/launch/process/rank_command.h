#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// What is executed as one rank, and where: the same for all that starts ranks or only tells of it (--dry-run).
struct RankCommand {
  std::string program;  ///< path to execute
  std::vector<std::string> arguments;
  Placement placement;
  int threads = 1;  ///< its share of the cores
};

/// `environment` is the ranks'. Looks at the machine; throws LaunchError when the program, the debugger or the CPUs
/// are not there.
std::vector<RankCommand> plan_ranks(const LaunchOptions& options, const EnvironmentBlock& environment);

/// What the options ask for that this machine does not give, or gives badly: lines for the user.
std::vector<std::string> plan_warnings(const LaunchOptions& options);

/// For --dry-run: per rank its command, what it gets in its environment, and its CPUs.
std::string describe_plan(const LaunchOptions& options, const EnvironmentBlock& environment);

}  // namespace lockstep
