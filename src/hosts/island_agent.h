#pragma once

#include "hosts/agent.h"

namespace lockstep::hosts {

/// One machine of a run of --islands: starts a run of its own as the hub orders, and carries what its first rank and
/// the hub say to each other: between the machines in a channel that the run's key has authenticated, within the
/// machine over a socket that only its user can open. Returns the exit code. Throws LaunchError. REQUIRES: the process
/// has no other thread.
int run_island_agent(const AgentOptions& options, const Key& key, const EnvironmentBlock& environment);

}  // namespace lockstep::hosts
