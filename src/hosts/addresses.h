#pragma once

#include <sys/socket.h>

#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep::hosts {

/// "node1:29400", "10.0.0.1:29400", "[fd00::1]:29400".
struct Endpoint {
  std::string host;
  int port = 0;

  std::string text() const;
  bool operator==(const Endpoint&) const = default;
};
/// Throws LaunchError (bad command line), naming the option.
Endpoint parse_endpoint(const std::string& option, const std::string& text);

/// The numeric addresses of this machine that others can reach, in the order of its interfaces, without loopback and
/// link-local addresses.
std::vector<std::string> own_addresses();

/// This machine's address on `interface`: the name of an interface (eth0), an address, or a network (10.0.0.0/24).
/// Throws LaunchError (not started) that lists the choices.
std::string address_on(const std::string& interface);

/// The numeric addresses of `host`; none if its name cannot be resolved.
std::vector<std::string> resolve(const std::string& host);
bool is_loopback(const std::string& address);

/// The numeric address from which packets to `address` leave; empty if there is no route.
std::string route_towards(const std::string& address);

/// The addresses on which the coordinator listens so that `hosts` can reach it: those of the routes to them, or all of
/// this machine's if a name is unknown here (a container's, for instance). Only loopback if all hosts are this machine.
std::vector<std::string> addresses_towards(const std::vector<std::string>& hosts);

/// The addresses on which to listen for a rendezvous on `host`, which must be this machine: its address, or all of this
/// machine's if the name resolves to loopback, as Debian's name for the machine itself does. Throws LaunchError (not
/// started).
std::vector<std::string> addresses_of_rendezvous(const std::string& host);

/// Listens on `port` (0: a free one) of a numeric address, and returns the socket, non-blocking. Throws LaunchError
/// (not started).
struct Listener {
  FileDescriptor socket;
  Endpoint endpoint;
};
Listener listen_on(const std::string& address, int port);

/// Connects a non-blocking socket. Returns 0, or the error: ETIMEDOUT after `milliseconds`.
int connect_within(int socket, const sockaddr* address, socklen_t length, int milliseconds);

/// A connection to the first address of `endpoint` that accepts one; empty if none does, with the reason in `why`.
FileDescriptor connect_to(const Endpoint& endpoint, const Deadline& deadline, std::string& why);

}  // namespace lockstep::hosts
