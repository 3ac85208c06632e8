#pragma once

#include <CLI/CLI.hpp>
#include <optional>
#include <string>
#include <vector>

#include "hosts/agent.h"
#include "hosts/coordinator.h"
#include "launch/plan.h"

namespace lockstep {

/// This process's part in a run on several machines: one of the two.
struct HostsRequest {
  std::optional<hosts::CoordinatorOptions> coordinator;
  std::optional<hosts::AgentOptions> agent;
  std::string key_file;  ///< empty: a fresh key
};

/// The options of `lockstep run` for several machines.
class HostsOptions {
 public:
  void add_to(CLI::App& app);
  /// Whether the words, or Slurm's variables, request several machines.
  bool asked_for(const EnvironmentBlock& environment) const;
  /// The request of these options. `ranks`, from -n, applies to each machine without its own number, and becomes their
  /// sum if that is known. Throws LaunchError (bad command line; for the key: authentication refused).
  /// `islands`: the hosts' own runs, which other machines may join at the rendezvous.
  HostsRequest read(const EnvironmentBlock& environment, const std::vector<std::string>& command, int& ranks,
                    bool islands = false) const;
  /// The default of -n: under Slurm the number of cores.
  static bool is_slurms(const EnvironmentBlock& environment);

 private:
  void encrypt(hosts::CoordinatorOptions& coordinator) const;
  HostsRequest started_by_hand(const EnvironmentBlock& environment, const std::vector<std::string>& command,
                               int& ranks) const;

  std::optional<std::string> hosts_, hostfile_, launch_command_, interface_, nodes_, node_, rendezvous_, key_file_,
      link_port_, relay_;
  bool encrypt_ = false;
};

}  // namespace lockstep
