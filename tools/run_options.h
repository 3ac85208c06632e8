#pragma once

#include <memory>
#include <string>
#include <vector>

#include "hosts/islands.h"
#include "hosts_options.h"
#include "launch/plan.h"

namespace CLI {
class App;
}

namespace lockstep {

/// The request of a `lockstep run` command line.
struct RunRequest {
  LaunchOptions options;
  EnvironmentBlock variables;                    ///< of --env
  std::optional<HostsRequest> hosts;             ///< for a run on several machines
  std::optional<hosts::IslandsOptions> islands;  ///< with --islands; then `hosts` is empty
  bool dry_run = false;
  std::string help;  ///< not empty: only print this
};

/// Reads the words after `lockstep run`, and Slurm's variables for several machines in `environment`. Throws
/// LaunchError (bad command line).
RunRequest parse_run_command(std::vector<std::string> words, int usable_cores, int gpus = 0,
                             const EnvironmentBlock& environment = {});

/// `lockstep run` with all its options, for descriptions, not for parsing.
std::shared_ptr<const CLI::App> describe_run_command();

extern const char* const kRunUsage;

/// `lockstep run` with the words after it. Returns the exit code; throws LaunchError.
int run_command(std::vector<std::string> words, const EnvironmentBlock& environment);

/// `lockstep agent`, which `lockstep run` starts on each machine. Returns the exit code; throws LaunchError.
int agent_command(const std::vector<std::string>& words, const EnvironmentBlock& environment);

}  // namespace lockstep
