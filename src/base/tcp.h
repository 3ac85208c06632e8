#pragma once

#include <string>

#include "base/file_descriptor.h"

namespace lockstep {

/// A TCP socket that listens on `port` of the address `host` resolves to, which must be this machine's; never on the
/// wildcard address. Throws Error naming both.
FileDescriptor listen_tcp(const std::string& host, int port);

/// The local address from which packets to `host` leave, as text. Sends nothing. Throws Error if there is no route.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
