#include "collectives/tcp.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <thread>

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

/// Whether listening there would accept connections from every network of this machine.
bool is_wildcard(const addrinfo& address) {
  if (address.ai_family == AF_INET)
    return reinterpret_cast<const sockaddr_in*>(address.ai_addr)->sin_addr.s_addr == htonl(INADDR_ANY);
  const auto& sixteen = reinterpret_cast<const sockaddr_in6*>(address.ai_addr)->sin6_addr;
  const bool ends_in_zeros = sixteen.s6_addr32[3] == 0;
  return IN6_IS_ADDR_UNSPECIFIED(&sixteen) || (IN6_IS_ADDR_V4MAPPED(&sixteen) && ends_in_zeros);
}

/// Zero, or the errno of the failure.
int try_connect(const addrinfo& address, const Deadline& deadline) {
  const FileDescriptor socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) return errno;
  if (connect(socket.get(), address.ai_addr, address.ai_addrlen) == 0) return 0;
  if (errno != EINPROGRESS) return errno;
  pollfd polled{.fd = socket.get(), .events = POLLOUT};
  if (::poll(&polled, 1, deadline.remaining_ms()) <= 0) return ETIMEDOUT;
  int error = 0;
  socklen_t length = sizeof error;
  return getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 ? error : errno;
}

std::string with_port(const std::string& host, int port) { return host + " port " + std::to_string(port); }

}  // namespace

FileDescriptor listen_tcp(const std::string& host, int port) {
  const Addresses addresses = resolve(host, port, SOCK_STREAM);
  for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (is_wildcard(*address))
      throw Error("rank 0 does not listen on " + with_port(host, port) +
                  ", which would mean every network of the machine; set MASTER_ADDR to the one address that the other "
                  "ranks reach");
    FileDescriptor socket(::socket(address->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const int on = 1;
    if (!socket || setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0) continue;
    if (bind(socket.get(), address->ai_addr, address->ai_addrlen) == 0 && listen(socket.get(), SOMAXCONN) == 0)
      return socket;
  }
  throw_errno("rank 0 cannot listen on " + with_port(host, port) +
              " (MASTER_ADDR must be an address of rank 0's machine, and MASTER_PORT must be free there)");
}

void await_listener(const std::string& host, int port, const Deadline& deadline) {
  for (auto pause = std::chrono::milliseconds(5);; pause = std::min(2 * pause, std::chrono::milliseconds(200))) {
    std::string why;
    try {
      const Addresses addresses = resolve(host, port, SOCK_STREAM);
      for (const addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
        errno = try_connect(*address, deadline);
        if (errno == 0) return;
        why = std::strerror(errno);
      }
    } catch (const Error& error) {
      why = error.what();  // a name may also become resolvable later
    }
    if (deadline.passed()) throw Error("nothing answers on " + with_port(host, port) + " (" + why + ")");
    std::this_thread::sleep_for(pause);
  }
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
