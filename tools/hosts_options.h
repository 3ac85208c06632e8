#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hosts/agent.h"
#include "hosts/coordinator.h"
#include "launch/plan.h"

namespace lockstep {

/// The part that this process has in a run on several machines: one of the two.
struct HostsRequest {
  std::optional<hosts::CoordinatorOptions> coordinator;
  std::optional<hosts::AgentOptions> agent;
  std::string key_file;  ///< empty: a fresh key
};

/// The options of `lockstep run` for several machines.
class HostsOptions {
 public:
  void add_to(CLI::App& app);
  /// Whether the words, or Slurm's variables, ask for several machines.
  bool asked_for(const EnvironmentBlock& environment) const;
  /// The request that these options make. `ranks`: of -n, for each machine without its own number; becomes their sum,
  /// if it is known. Throws LaunchError (bad command line; for the key: authentication refused).
  HostsRequest read(const EnvironmentBlock& environment, const std::vector<std::string>& command, int& ranks) const;
  /// The default of -n: under Slurm as many as there are cores.
  static bool is_slurms(const EnvironmentBlock& environment);

 private:
  HostsRequest started_by_hand(const EnvironmentBlock& environment, const std::vector<std::string>& command,
                               int& ranks) const;

  std::optional<std::string> hosts_, hostfile_, launch_command_, interface_, nodes_, node_, rendezvous_, key_file_;
};

}  // namespace lockstep
