#include "hosts/addresses.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netdb.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <memory>

#include "launch/launch_error.h"
#include "launch/option_values.h"

namespace lockstep::hosts {
namespace {

using Found = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

Found look_up(const std::string& host, int port, int flags) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = flags;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) found = nullptr;
  return {found, &freeaddrinfo};
}

std::string numeric(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  if (getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) != 0) return "";
  return text.data();
}

struct Own {
  std::string interface, address;
};

/// All addresses of this machine's active interfaces.
std::vector<Own> list_own() {
  ifaddrs* list = nullptr;
  std::vector<Own> found;
  if (::getifaddrs(&list) != 0) return found;
  for (const ifaddrs* one = list; one != nullptr; one = one->ifa_next) {
    if (one->ifa_addr == nullptr || (one->ifa_flags & IFF_UP) == 0) continue;
    const int family = one->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(one->ifa_addr)->sin6_addr))
      continue;
    const socklen_t length = family == AF_INET ? sizeof(sockaddr_in) : sizeof(sockaddr_in6);
    found.push_back({one->ifa_name, numeric(one->ifa_addr, length)});
  }
  ::freeifaddrs(list);
  return found;
}

std::vector<unsigned char> bytes_of(const std::string& address) {
  std::array<unsigned char, 16> bytes{};
  if (::inet_pton(AF_INET, address.c_str(), bytes.data()) == 1) return {bytes.begin(), bytes.begin() + 4};
  if (::inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) return {bytes.begin(), bytes.end()};
  return {};
}

/// Whether `address` is in `network`, such as 10.0.0.0/24.
bool is_in(const std::string& address, const std::string& network) {
  const size_t slash = network.find('/');
  if (slash == std::string::npos) return false;
  const auto base = bytes_of(network.substr(0, slash)), own = bytes_of(address);
  const std::string digits = network.substr(slash + 1);
  if (base.empty() || base.size() != own.size() || digits.empty() || digits.size() > 3 ||
      digits.find_first_not_of("0123456789") != std::string::npos)
    return false;
  const size_t bits = std::min<size_t>(std::stoul(digits), 8 * base.size());
  for (size_t bit = 0; bit < bits; ++bit)
    if (((base[bit / 8] ^ own[bit / 8]) >> (7 - bit % 8) & 1) != 0) return false;
  return true;
}

void add_new(std::vector<std::string>& list, const std::string& one) {
  if (!one.empty() && std::find(list.begin(), list.end(), one) == list.end()) list.push_back(one);
}

}  // namespace

std::string Endpoint::text() const {
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + std::to_string(port);
}

Endpoint parse_endpoint(const std::string& option, const std::string& text) {
  const size_t colon = text.rfind(':');
  if (colon == std::string::npos || colon == 0 || colon + 1 == text.size())
    throw LaunchError(kExitBadCommandLine, option + " takes HOST:PORT, such as node1:29400; it got '" + text + "'");
  Endpoint endpoint{.host = text.substr(0, colon), .port = parse_number(option, text.substr(colon + 1), 1, 65535)};
  if (endpoint.host.size() > 2 && endpoint.host.front() == '[' && endpoint.host.back() == ']')
    endpoint.host = endpoint.host.substr(1, endpoint.host.size() - 2);
  return endpoint;
}

std::vector<std::string> own_addresses() {
  std::vector<std::string> addresses;
  for (const Own& own : list_own())
    if (!is_loopback(own.address)) add_new(addresses, own.address);
  return addresses;
}

std::string address_on(const std::string& interface) {
  std::string known;
  for (const Own& own : list_own()) {
    if (own.interface == interface || own.address == interface || is_in(own.address, interface)) return own.address;
    known += (known.empty() ? "" : ", ") + own.interface + " " + own.address;
  }
  throw LaunchError(kExitNotStarted, "--interface " + interface +
                                         ": no interface of this machine that is up has that " +
                                         "name, address or network; there are " + known);
}

std::vector<std::string> resolve(const std::string& host) {
  std::vector<std::string> addresses;
  const Found found = look_up(host, 0, 0);
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next)
    add_new(addresses, numeric(one->ai_addr, one->ai_addrlen));
  return addresses;
}

bool is_loopback(const std::string& address) { return address.starts_with("127.") || address == "::1"; }

std::string route_towards(const std::string& address) {
  const Found found = look_up(address, 9, AI_NUMERICHOST);
  if (!found) return "";
  // Connecting a datagram socket chooses the route and with it the source address; nothing is sent.
  const FileDescriptor socket(::socket(found->ai_family, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (!socket || ::connect(socket.get(), found->ai_addr, found->ai_addrlen) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0)
    return "";
  return numeric(reinterpret_cast<sockaddr*>(&local), length);
}

std::vector<std::string> addresses_towards(const std::vector<std::string>& hosts) {
  std::vector<std::string> routes, loopback;
  bool unknown = false;
  for (const std::string& host : hosts) {
    bool reached = false;
    for (const std::string& address : resolve(host)) {
      const std::string route = route_towards(address);
      reached = reached || !route.empty();
      add_new(is_loopback(route) ? loopback : routes, route);
    }
    // One unreachable host suffices to need all of this machine's addresses, and each may cost seconds of waiting for a
    // name server.
    unknown = !reached;
    if (unknown) break;
  }
  if (unknown || (routes.empty() && loopback.empty()))
    for (const std::string& own : own_addresses()) add_new(routes, own);
  if (routes.empty()) routes = loopback;
  if (routes.empty()) routes.emplace_back("127.0.0.1");
  return routes;
}

std::vector<std::string> addresses_of_rendezvous(const std::string& host) {
  const auto named = resolve(host);
  if (named.empty())
    throw LaunchError(kExitNotStarted, "--rendezvous: the host name `" + host + "` cannot be resolved on this machine");
  std::vector<std::string> addresses;
  const auto own = list_own();
  bool loopback = false;
  for (const std::string& one : named) {
    loopback = loopback || is_loopback(one);
    if (!is_loopback(one) && std::any_of(own.begin(), own.end(), [&](const Own& o) { return o.address == one; }))
      add_new(addresses, one);
  }
  if (addresses.empty() && !loopback)
    throw LaunchError(kExitNotStarted, "--rendezvous: " + host + " (" + named.front() + ") is not an address of this " +
                                           "machine, which has --node-rank 0; name this machine");
  // The machine's own name may resolve to 127.0.1.1 here, while the others know its real address.
  const bool literal = std::find(named.begin(), named.end(), host) != named.end() || host == "localhost";
  if (loopback && !literal)
    for (const std::string& one : own_addresses()) add_new(addresses, one);
  if (loopback) add_new(addresses, named.front());
  return addresses;
}

Listener listen_on(const std::string& address, int port) {
  const auto fail = [&](const std::string& why) -> LaunchError {
    return {kExitNotStarted, "cannot listen on " + Endpoint{address, port}.text() + ": " + why};
  };
  const Found found = look_up(address, port, AI_NUMERICHOST | AI_PASSIVE);
  if (!found) throw fail("it is not an address");
  FileDescriptor socket(::socket(found->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int on = 1;
  sockaddr_storage local{};
  socklen_t length = sizeof local;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) != 0 ||
      ::bind(socket.get(), found->ai_addr, found->ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0 ||
      ::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&local), &length) != 0) {
    if (errno == EADDRINUSE)
      throw fail("the port is taken by another program, or by another run; end that one, or choose another port");
    throw fail(std::strerror(errno));
  }
  const auto* sixteen = reinterpret_cast<const sockaddr_in6*>(&local);
  return {std::move(socket), {address, ntohs(sixteen->sin6_port)}};  // at the same place for IPv4
}

int connect_within(int socket, const sockaddr* address, socklen_t length, int milliseconds) {
  int error = ::connect(socket, address, length) == 0 ? 0 : errno;
  if (error != EINPROGRESS) return error;
  pollfd polled{.fd = socket, .events = POLLOUT, .revents = 0};
  socklen_t size = sizeof error;
  if (::poll(&polled, 1, milliseconds) <= 0) return ETIMEDOUT;
  return ::getsockopt(socket, SOL_SOCKET, SO_ERROR, &error, &size) == 0 ? error : errno;
}

FileDescriptor connect_to(const Endpoint& endpoint, const Deadline& deadline, std::string& why) {
  const Found found = look_up(endpoint.host, endpoint.port, 0);
  if (!found) why = "the host name `" + endpoint.host + "` cannot be resolved";
  for (const addrinfo* one = found.get(); one != nullptr; one = one->ai_next) {
    FileDescriptor socket(::socket(one->ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    if (!socket) continue;
    const int error = connect_within(socket.get(), one->ai_addr, one->ai_addrlen, deadline.remaining_ms());
    if (error == 0) return socket;
    why = std::strerror(error);
  }
  return {};
}

}  // namespace lockstep::hosts
