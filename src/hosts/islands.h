#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "hosts/host_list.h"
#include "launch/plan.h"

namespace lockstep::hosts {

struct IslandsOptions {
  std::vector<Host> hosts;
  std::string launch_command, interface;
  std::string run_dir;
  std::vector<std::string> run_options;  ///< of `lockstep run` on each machine
  std::vector<std::string> command;
  int least = 1;         ///< machines
  int max_restarts = 0;  ///< of each machine
  std::optional<std::chrono::milliseconds> round_deadline;
};

/// Starts a run of its own on each machine, and is the hub of their rounds. Returns the exit code. Throws LaunchError.
int run_islands(const IslandsOptions& options, const EnvironmentBlock& environment);

}  // namespace lockstep::hosts
