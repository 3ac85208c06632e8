#include "hosts/relay_client.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>

#include "hosts/addresses.h"
#include "hosts/link_sockets.h"

namespace lockstep::hosts {

FileDescriptor connect_to_relay(const LinkPlan& plan, const Key& key, RelayRequest request,
                                std::chrono::milliseconds time, std::string& why) {
  const LinkPeer& relay = plan.machines[static_cast<size_t>(plan.relay)];
  const Deadline deadline(time);
  request.start = plan.start;
  request.from = static_cast<uint32_t>(plan.machine);
  FileDescriptor wire = connect_to({relay.address, relay.port}, deadline, why);
  if (!wire) {
    why = "the relay " + relay.name + ": " + why;
    return {};
  }
  keep_alive(wire.get());
  if (ask_relay(wire.get(), key, request, deadline)) return wire;
  why = "the relay " + relay.name + " has no connection from it";
  return {};
}

std::optional<uint64_t> next_token(int registered) {
  uint64_t token = 0;
  for (size_t received = 0; received < sizeof token;) {
    pollfd polled{.fd = registered, .events = POLLIN, .revents = 0};
    ::poll(&polled, 1, -1);
    const ssize_t count =
        ::recv(registered, reinterpret_cast<char*>(&token) + received, sizeof token - received, MSG_DONTWAIT);
    if (count == 0 || (count < 0 && errno != EAGAIN && errno != EINTR)) return std::nullopt;
    if (count > 0) received += static_cast<size_t>(count);
  }
  return token;
}

}  // namespace lockstep::hosts
