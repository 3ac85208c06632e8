#pragma once

#include <string>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// A TCP socket that listens on `port` of the address of `host`, which must be this machine's; never on the wildcard
/// address. Throws Error naming both.
FileDescriptor listen_tcp(const std::string& host, int port);

/// Waits for a listener on `port` of `host`, by connecting and closing the connection. Throws Error naming both, and
/// the last failure, at the deadline.
void await_listener(const std::string& host, int port, const Deadline& deadline);

/// The local address from which packets to `host` leave, as text. Sends nothing. Throws Error if there is no route.
std::string address_towards(const std::string& host, int port);

}  // namespace lockstep
