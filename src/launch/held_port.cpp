#include "launch/held_port.h"

#include <netdb.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <memory>

namespace lockstep {

HeldPort::HeldPort(const std::string& address) {
  addrinfo hints{};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* found = nullptr;
  if (getaddrinfo(address.c_str(), "0", &hints, &found) != 0) return;
  const std::unique_ptr<addrinfo, decltype(&freeaddrinfo)> owner(found, &freeaddrinfo);
  socket_ = FileDescriptor(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const int yes = 1;
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (!socket_ || ::setsockopt(socket_.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0 ||
      ::bind(socket_.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket_.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0)
    return;
  number_ = ntohs(reinterpret_cast<const sockaddr_in6*>(&local)->sin6_port);  // at the same place for IPv4
}

}  // namespace lockstep
