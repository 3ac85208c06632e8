#pragma once

#include <string>
#include <vector>

#include "hosts/messages.h"
#include "launch/held_port.h"
#include "launch/process/team.h"
#include "launch/run_folder.h"

namespace lockstep::hosts {

/// The environment of a machine's ranks: the coordinator's, except for variables that describe a single machine or
/// login, which come from the machine's agent.
EnvironmentBlock environment_here(const EnvironmentBlock& coordinators, const EnvironmentBlock& own);

/// The folder, environment, commands and address with which the ranks of one machine start, from the coordinator's
/// plan.
class Workplace {
 public:
  /// Changes to the plan's folder. `own` is the agent's environment. `interface` is the interface of the ranks'
  /// address; empty: the plan's address, or `local_address` if the plan has none. Throws LaunchError.
  Workplace(const Prepare& plan, const EnvironmentBlock& own, const std::string& interface,
            const std::string& local_address);

  /// The facts that the coordinator compares between machines.
  Ready ready() const;
  /// The setup for the ranks of a start. It refers to this object, as does the team made from it. Throws LaunchError.
  TeamSetup setup(const Start& order, const LauncherSettings& settings, const Guard& guard, int memory_fd);

  const std::string& address() const { return address_; }
  /// The run's folder.
  const std::string& folder() const { return folder_.path(); }

 private:
  const EnvironmentBlock environment_;
  LaunchOptions options_;
  std::vector<RankCommand> commands_;
  const RunFolder folder_;
  const std::string address_;
  const HeldPort port_;
  const std::string run_id_;
  // Output goes to the coordinator, and no rank reads a terminal.
  Display display_{{}};
  TerminalInput input_;
};

/// The script passed to a program: the first argument that ends in.py or.sh. Empty if none.
std::string script_of(const std::vector<std::string>& command);

/// SHA-256, in hexadecimal, of the program and of its script, so that machines with other copies are detected. Empty if
/// the program cannot be read.
std::string program_hash(const std::string& program, const std::vector<std::string>& command);

}  // namespace lockstep::hosts
