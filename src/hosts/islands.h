#pragma once

#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "hosts/coordinator.h"
#include "launch/plan.h"

namespace lockstep::hosts {

struct IslandsOptions {
  CoordinatorOptions machines;
  std::string run_dir;
  std::vector<std::string> run_options;  ///< of `lockstep run` on each machine
  std::vector<std::string> command;
  std::string key_file;          ///< of machines that join; empty: the run has a key of its own, and none joins
  int least = 1;                 ///< machines
  int most = 1;                  ///< machines, those included that may join
  bool goes_on_without = false;  ///< one that will not come again
  int max_restarts = 0;          ///< of each machine
  int restarts_per_hour = kAnyNumber;
  std::optional<std::chrono::milliseconds> round_deadline;
};

/// Starts a run of its own on each machine, and is the hub of their rounds. Returns the exit code. Throws LaunchError.
int run_islands(const IslandsOptions& options, const Key& key, const EnvironmentBlock& environment);

}  // namespace lockstep::hosts
