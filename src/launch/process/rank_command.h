#pragma once

#include <string>
#include <vector>

#include "launch/plan.h"

namespace lockstep {

/// The command of one rank and its working folder. --dry-run prints it.
struct RankCommand {
  std::string program;  ///< path to execute
  std::vector<std::string> arguments;
  Placement placement;
  int threads = 1;  ///< its share of the cores
};

/// `environment` is the ranks'. Inspects the machine. Throws LaunchError if the program, the debugger or the CPUs are
/// missing.
std::vector<RankCommand> plan_ranks(const LaunchOptions& options, const EnvironmentBlock& environment);

/// Warnings for the user about options that this machine cannot support, or supports badly.
std::vector<std::string> plan_warnings(const LaunchOptions& options, const EnvironmentBlock& environment);
/// Throws LaunchError (bad command line) if a number of ranks that --elastic allows is impossible. `here`: all ranks
/// are on this machine.
void check_elastic(const LaunchOptions& options, const EnvironmentBlock& environment, bool here);

/// A warning that the results depend on the number of ranks; empty if they do not, or the number does not change.
std::string elastic_warning(const LaunchOptions& options, const EnvironmentBlock& environment);

/// For --dry-run: each rank's command, its additional environment, and its CPUs.
std::string describe_plan(const LaunchOptions& options, const EnvironmentBlock& environment);

}  // namespace lockstep
