#pragma once

#include <memory>

#include "hosts/agent.h"
#include "hosts/channel.h"
#include "launch/process/process.h"

namespace lockstep::hosts {

/// A channel to the coordinator, which may not be running yet. Throws LaunchError if the patience is over, the
/// coordinator has another key, or a signal arrives.
std::unique_ptr<Channel> connect_to_coordinator(const AgentOptions& options, const Tls& tls,
                                                const LauncherSettings& settings, const Deadline& deadline);

}  // namespace lockstep::hosts
