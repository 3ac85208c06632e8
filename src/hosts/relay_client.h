#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/file_descriptor.h"
#include "hosts/key.h"
#include "hosts/link_plan.h"
#include "hosts/relay_request.h"

namespace lockstep::hosts {

/// A connection to the plan's relay, which carries out `request` of this machine; empty if it does not, with the reason
/// in `why`. `time` is for the connection and for the relay's answer.
FileDescriptor connect_to_relay(const LinkPlan& plan, const Key& key, RelayRequest request,
                                std::chrono::milliseconds time, std::string& why);

/// Waits on a registered connection for the token of the next connection to answer. Empty once the connection has
/// ended.
std::optional<uint64_t> next_token(int registered);

}  // namespace lockstep::hosts
