#include "base/socket.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>

namespace lockstep {
namespace {

/// Returns false if the deadline passes first. Errors and hang-ups count as ready: the call that follows reports them.
bool wait_ready(int socket, short events, const Deadline& deadline) {
  pollfd polled{.fd = socket, .events = events};
  for (;;) {
    const int ready = ::poll(&polled, 1, deadline.remaining_ms());
    if (ready > 0) return true;
    if (ready < 0 && errno != EINTR) throw_errno("waiting for a socket");
    if (deadline.passed()) return false;
  }
}

[[noreturn]] void throw_late(const char* what, size_t done, size_t size) {
  throw Error(std::string(what) + " timed out after " + std::to_string(done) + " of " + std::to_string(size) +
              " bytes");
}

constexpr size_t kNameOffset = offsetof(sockaddr_un, sun_path);

}  // namespace

SocketPair make_socket_pair() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw_errno("making a socket pair");
  return {FileDescriptor(ends[0]), FileDescriptor(ends[1])};
}

void send_all(int socket, const void* data, size_t size, const Deadline& deadline) {
  const auto* bytes = static_cast<const char*>(data);
  for (size_t done = 0; done < size;) {
    const ssize_t count = ::send(socket, bytes + done, size - done, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count >= 0) {
      done += static_cast<size_t>(count);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(socket, POLLOUT, deadline)) throw_late("sending", done, size);
    } else if (errno == EPIPE || errno == ECONNRESET) {
      throw ConnectionClosed("the other side closed the connection");
    } else if (errno != EINTR) {
      throw_errno("sending");
    }
  }
}

size_t receive_some(int socket, void* data, size_t size, const Deadline& deadline) {
  for (;;) {
    const ssize_t count = ::recv(socket, data, size, MSG_DONTWAIT);
    if (count > 0) return static_cast<size_t>(count);
    if (count == 0 || errno == ECONNRESET) throw ConnectionClosed("the other side closed the connection");
    if (errno == EAGAIN || errno == EWOULDBLOCK) {
      if (!wait_ready(socket, POLLIN, deadline)) return 0;
    } else if (errno != EINTR) {
      throw_errno("receiving");
    }
  }
}

void receive_all(int socket, void* data, size_t size, const Deadline& deadline) {
  auto* bytes = static_cast<char*>(data);
  for (size_t done = 0; done < size;) {
    const size_t count = receive_some(socket, bytes + done, size - done, deadline);
    if (count == 0) throw_late("receiving", done, size);
    done += count;
  }
}

namespace {

struct UnixAddress {
  sockaddr_un value{};
  socklen_t length;
};

/// The abstract address of `name`. An empty name gives only the family: bind then chooses a free name.
UnixAddress abstract_address(const std::string& name) {
  UnixAddress address{.length = sizeof(sa_family_t)};
  address.value.sun_family = AF_UNIX;
  if (name.empty()) return address;
  if (name.size() >= sizeof address.value.sun_path)
    throw Error("the name of a Unix socket is too long: '" + name + "'");
  name.copy(address.value.sun_path + 1, name.size());
  address.length = static_cast<socklen_t>(kNameOffset + 1 + name.size());
  return address;
}

bool same_user(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  return ::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) == 0 && peer.uid == ::geteuid();
}

}  // namespace

UnixListener listen_unix(const std::string& name) {
  UnixListener listener{.socket = FileDescriptor(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)),
                        .name = {}};
  if (!listener.socket) throw_errno("making a Unix socket");
  UnixAddress address = abstract_address(name);
  if (::bind(listener.socket.get(), reinterpret_cast<sockaddr*>(&address.value), address.length) != 0)
    throw_errno("binding a Unix socket '" + name + "'");
  if (::listen(listener.socket.get(), SOMAXCONN) != 0) throw_errno("listening on a Unix socket");
  address.length = sizeof address.value;
  if (::getsockname(listener.socket.get(), reinterpret_cast<sockaddr*>(&address.value), &address.length) != 0)
    throw_errno("reading the name of a Unix socket");
  listener.name.assign(address.value.sun_path + 1, address.length - kNameOffset - 1);
  return listener;
}

FileDescriptor connect_unix(const std::string& name) {
  const UnixAddress address = abstract_address(name);
  FileDescriptor socket(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (!socket) throw_errno("making a Unix socket");
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address.value), address.length) != 0)
    throw_errno("connecting to the Unix socket '" + name + "'");
  if (!same_user(socket.get())) throw Error("the Unix socket '" + name + "' belongs to a process of another user");
  return socket;
}

FileDescriptor accept_same_user(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC));
  return socket && same_user(socket.get()) ? std::move(socket) : FileDescriptor();
}

}  // namespace lockstep
