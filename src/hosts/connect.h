#pragma once

#include <memory>

#include "hosts/agent.h"
#include "hosts/channel.h"
#include "launch/process/process.h"

namespace lockstep::hosts {

/// A channel to the coordinator, which may not be there yet. Throws LaunchError: the patience is over, the coordinator
/// has another key, or a signal has come.
std::unique_ptr<Channel> connect_to_coordinator(const AgentOptions& options, const Tls& tls,
                                                const LauncherSettings& settings, const Deadline& deadline);

}  // namespace lockstep::hosts
