#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "hosts/addresses.h"
#include "hosts/key.h"
#include "launch/plan.h"

namespace lockstep::hosts {

struct AgentOptions {
  std::vector<Endpoint> coordinators;  ///< addresses of the one coordinator, to try in turn
  int node = 0;
  std::string interface;  ///< the interface of the ranks' address; empty: the route's to the coordinator
  std::chrono::milliseconds patience{30000};  ///< for the coordinator to answer

  // For an agent started by a user or by Slurm.
  bool by_hand = false;
  int nodes = 0;
  int slots = 0;
  std::string command;
  bool encrypt = false;  ///< a coordinator that does not encrypt refuses it

  std::string join_name;  ///< of a machine that joins a run of --islands; empty: it was started by it
};

/// Runs one machine's ranks for a coordinator elsewhere: connects to it, starts the ranks that it orders, forwards
/// their output, ends and pages, and kills them when the channel ends. Returns the run's exit code. `environment` is
/// this process's own. Throws LaunchError.
/// REQUIRES: the process has no other thread, as for launch().
int run_agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment);

}  // namespace lockstep::hosts
