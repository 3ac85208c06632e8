#include "base/tcp.h"

#include <arpa/inet.h>
#include <netdb.h>
#include <sys/socket.h>

#include <memory>

#include "base/error.h"

namespace lockstep {
namespace {

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Addresses resolve(const std::string& host, int port, int type) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = type;
  addrinfo* found = nullptr;
  const int code = getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found);
  if (code != 0) throw Error("the host name `" + host + "` cannot be resolved: " + gai_strerror(code));
  return {found, &freeaddrinfo};
}

std::string with_port(const std::string& host, int port) { return host + " port " + std::to_string(port); }

}  // namespace

FileDescriptor listen_tcp(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port, SOCK_STREAM);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    FileDescriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (!socket || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) continue;
    if (bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 && listen(socket.get(), SOMAXCONN) == 0)
      return socket;
  }
  throw_errno("rank 0 cannot listen on " + with_port(host, port) +
              " (MASTER_ADDR must be an address of rank 0's machine and MASTER_PORT free there)");
}

std::string address_towards(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port, SOCK_DGRAM);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    // Connecting a datagram socket chooses the route and with it the source address; nothing is sent.
    FileDescriptor socket(::socket(address->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    sockaddr_storage local{};
    socklen_t length = sizeof local;
    char text[NI_MAXHOST];
    if (socket && connect(socket.get(), address->ai_addr, address->ai_addrlen) == 0 &&
        getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) == 0 &&
        getnameinfo(reinterpret_cast<sockaddr*>(&local), length, text, sizeof text, nullptr, 0, NI_NUMERICHOST) == 0)
      return text;
  }
  throw_errno("there is no route to " + with_port(host, port));
}

}  // namespace lockstep
