#pragma once

#include <string>
#include <vector>

#include "hosts/agent.h"
#include "hosts/coordinator.h"

namespace lockstep::hosts {

/// The command that the coordinator starts for machine `node`: the launch command's words, then the agent's.
/// `endpoints` are the coordinator's addresses, separated by commas. Throws LaunchError (bad command line).
std::vector<std::string> agent_words(const CoordinatorOptions& options, size_t node, const std::string& endpoints);

/// The --dry-run output: each machine's ranks and the command that starts its agent, then the ranks' command. A port
/// and an address known only at a real start are named, not shown.
std::string describe_hosts(const CoordinatorOptions& options, const std::vector<std::string>& command);

/// The --dry-run output of a machine that joins a coordinator.
std::string describe_agent(const AgentOptions& options, const std::vector<std::string>& command);

}  // namespace lockstep::hosts
