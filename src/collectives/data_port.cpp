#include "collectives/data_port.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/mutex.h"

namespace lockstep {
namespace {

/// For connections that the kernel has accepted and Gloo's thread has not yet.
constexpr std::chrono::milliseconds kBacklog(100);

/// Empty if it has none.
std::string end_of(int socket, int (*name)(int, sockaddr*, socklen_t*)) {
  sockaddr_storage address{};
  auto* const place = reinterpret_cast<sockaddr*>(&address);
  socklen_t length = sizeof address;
  if (name(socket, place, &length) != 0 || (address.ss_family != AF_INET && address.ss_family != AF_INET6)) return "";
  char text[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(place, length, text, sizeof text, port, sizeof port, NI_NUMERICHOST | NI_NUMERICSERV) != 0) return "";
  std::string host = text;
  host = host.substr(0, host.find('%'));  // the scope's name differs elsewhere
  const std::string mapped = "::ffff:";   // an IPv6 socket that an IPv4 peer connected to
  if (host.starts_with(mapped) && host.find('.') != std::string::npos) host.erase(0, mapped.size());
  return (host.find(':') == std::string::npos ? host : "[" + host + "]") + ":" + port;
}

int option(int socket, int name) {
  int value = 0;
  socklen_t length = sizeof value;
  return ::getsockopt(socket, SOL_SOCKET, name, &value, &length) == 0 ? value : -1;
}

/// Calls `use` with each descriptor of this process that is a socket, and its inode.
void for_each_socket(const std::function<void(int fd, unsigned long inode)>& use) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), ::closedir);
  if (!folder) throw_errno_or_limit("looking at the connections of a group");
  while (const dirent* entry = ::readdir(folder.get())) {
    const int fd = std::atoi(entry->d_name);
    struct stat file {};
    if (entry->d_name[0] != '.' && ::fstat(fd, &file) == 0 && S_ISSOCK(file.st_mode)) use(fd, file.st_ino);
  }
}

/// Gloo owns the socket and must not find it closed, but the kernel can drop all data that arrives at it.
void let_nobody_in(int listener) {
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{.len = 1, .filter = &drop};
  if (::setsockopt(listener, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0)
    throw_errno("closing the data port of a group");
}

void await_empty_backlog(int listener) {
  for (const Deadline deadline{kBacklog}; !deadline.passed();) {
    tcp_info info{};
    socklen_t length = sizeof info;
    // For a listener: the number of connections that wait to be accepted.
    if (::getsockopt(listener, IPPROTO_TCP, TCP_INFO, &info, &length) != 0 || info.tcpi_unacked == 0) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

std::string host_of(const std::string& end) { return end.substr(0, end.rfind(':')); }

/// A connection to another loopback address than this machine's own is carried there by an encrypted link, and comes
/// from this machine's address (hosts/link_carrier.h).
std::string seen_from_there(const Connection& one, const std::string& own_host) {
  const bool is_carried = one.to.starts_with("127.") && own_host.starts_with("127.") && host_of(one.to) != own_host;
  return is_carried ? own_host + one.from.substr(one.from.rfind(':')) : one.from;
}

bool contains(const std::vector<Connection>& all, const Connection& one) {
  return std::find(all.begin(), all.end(), one) != all.end();
}

}  // namespace

Strangers find_strangers(const std::vector<Connection>& accepted, const std::vector<Connection>& made) {
  std::vector<Connection> unknown;
  for (const Connection& one : accepted)
    if (!contains(made, one)) unknown.push_back(one);
  // A rank's connection that arrived from another address is one of the unknown.
  const bool translated = std::any_of(made.begin(), made.end(), [&](const Connection& one) {
    return std::any_of(accepted.begin(), accepted.end(), [&](const Connection& other) { return other.to == one.to; }) &&
           !contains(accepted, one);
  });
  if (translated) return {.shut_down = {}, .untold = std::move(unknown)};
  return {.shut_down = std::move(unknown), .untold = {}};
}

DataPort::DataPort(const std::function<void()>& open) {
  static Mutex one_at_a_time;
  const MutexLock lock(one_at_a_time);
  for_each_socket([&](int, unsigned long inode) { before_.insert(inode); });
  open();
  for_each_new_socket([&](Socket&& socket) {
    if (socket.listens) listeners_.push_back(std::move(socket));
  });
}

void DataPort::for_each_new_socket(const std::function<void(Socket&&)>& use) const {
  for_each_socket([&](int number, unsigned long inode) {
    if (before_.contains(inode)) return;
    Socket socket{.fd = FileDescriptor(::fcntl(number, F_DUPFD_CLOEXEC, 0))};
    const int fd = socket.fd.get();
    if (!socket.fd && errno != EBADF) throw_errno_or_limit("looking at the connections of a group");
    if (!socket.fd || option(fd, SO_TYPE) != SOCK_STREAM) return;
    socket.listens = option(fd, SO_ACCEPTCONN) == 1;
    socket.ends = {.from = end_of(fd, &::getsockname), .to = end_of(fd, &::getpeername)};
    if (!socket.ends.from.empty() && (socket.listens || !socket.ends.to.empty())) use(std::move(socket));
  });
}

std::vector<std::string> DataPort::ends() const {
  std::vector<std::string> ends;
  for (const Socket& listener : listeners_) ends.push_back(listener.ends.from);
  return ends;
}

std::vector<Connection> DataPort::made() const {
  std::unordered_set<std::string> listening;
  std::vector<Connection> made;
  for_each_new_socket([&](const Socket& socket) {
    if (socket.listens)
      listening.insert(socket.ends.from);
    else
      made.push_back(socket.ends);
  });
  std::erase_if(made, [&](const Connection& one) { return listening.contains(one.from); });
  if (!listeners_.empty())
    for (Connection& one : made) one.from = seen_from_there(one, host_of(listeners_.front().ends.from));
  return made;
}

Strangers DataPort::close(const std::vector<Connection>& made) const {
  Strangers all;
  for (const Socket& listener : listeners_) {
    const std::string& port = listener.ends.from;
    const auto leads_here = [&](const Connection& one) { return one.to == port; };
    if (listeners_.size() > 1 && std::none_of(made.begin(), made.end(), leads_here)) continue;
    let_nobody_in(listener.fd.get());
    await_empty_backlog(listener.fd.get());
    const auto for_each_accepted = [&](const std::function<void(const Connection&, int)>& use) {
      for_each_new_socket([&](const Socket& socket) {
        if (!socket.listens && socket.ends.from == port) use({.from = socket.ends.to, .to = port}, socket.fd.get());
      });
    };
    std::vector<Connection> accepted;
    for_each_accepted([&](const Connection& one, int) { accepted.push_back(one); });
    Strangers found = find_strangers(accepted, made);
    for_each_accepted([&](const Connection& one, int socket) {
      if (contains(found.shut_down, one)) ::shutdown(socket, SHUT_RDWR);
    });
    all.shut_down.insert(all.shut_down.end(), found.shut_down.begin(), found.shut_down.end());
    all.untold.insert(all.untold.end(), found.untold.begin(), found.untold.end());
  }
  return all;
}

}  // namespace lockstep
