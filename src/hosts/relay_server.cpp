#include "hosts/relay_server.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>

#include "hosts/link_flow.h"
#include "hosts/link_sockets.h"

namespace lockstep::hosts {
namespace {

/// For a machine to register, and to answer. Less than the time within which a link must be made.
constexpr std::chrono::milliseconds kJoinTime(8000);

struct Stream : Flow {
  Stream(int from_, int to_) : from(from_), to(to_) {}

  /// Returns false if a connection is broken.
  bool move() {
    if (is_empty() && !source_ended) {
      const ssize_t count = ::recv(from, buffer.data(), buffer.size(), MSG_DONTWAIT);
      if (count < 0 && errno != EAGAIN && errno != EINTR) return false;
      if (count > 0) end = static_cast<size_t>(count);
      source_ended = count == 0;
    }
    while (!is_empty()) {
      const ssize_t count = ::send(to, data(), size(), MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count < 0 && errno == EINTR) continue;
      if (count < 0) return errno == EAGAIN;
      take(static_cast<size_t>(count));
    }
    if (has_to_end()) {
      sink_ended = true;
      ::shutdown(to, SHUT_WR);
    }
    return true;
  }

  const int from, to;
};

/// What to wait for on a connection, of which nothing more may be awaited: then its end must not wake the thread.
pollfd awaited(const Stream& out, const Stream& in) {
  short events = 0;
  if (out.is_empty() && !out.source_ended) events |= POLLIN;
  if (!in.is_empty()) events |= POLLOUT;
  return {.fd = events != 0 ? out.from : -1, .events = events, .revents = 0};
}

}  // namespace

void join(int one, int other) {
  Stream there(one, other), back(other, one);
  while (there.move() && back.move() && !(there.sink_ended && back.sink_ended)) {
    pollfd polled[] = {awaited(there, back), awaited(back, there)};
    ::poll(polled, 2, -1);
  }
  ::shutdown(one, SHUT_RDWR);
  ::shutdown(other, SHUT_RDWR);
}

void RelayServer::serve(FileDescriptor socket, const RelayRequest& request) {
  keep_alive(socket.get());
  set_on(socket.get(), IPPROTO_TCP, TCP_NODELAY);
  switch (request.kind) {
    case RelayRequest::kRegister:
      return keep_registered(socket, {request.start, request.from});
    case RelayRequest::kConnect:
      return connect(std::move(socket), {request.start, request.to});
    case RelayRequest::kBind:
      return bind(std::move(socket), request.token);
    default:
      return;
  }
}

void RelayServer::keep_registered(const FileDescriptor& socket, const Place& place) {
  if (!answer_request(socket.get(), kRelayed)) return;
  {
    const MutexLock lock(mutex_);
    registered_[place] = socket.get();  // of an earlier connection that the machine has given up
    changed_.notify_all();
  }
  char none;
  pollfd polled{.fd = socket.get(), .events = POLLIN, .revents = 0};
  do ::poll(&polled, 1, -1);
  while (::recv(socket.get(), &none, 1, MSG_DONTWAIT) < 0 && (errno == EAGAIN || errno == EINTR));
  const MutexLock lock(mutex_);
  const auto found = registered_.find(place);
  if (found != registered_.end() && found->second == socket.get()) registered_.erase(found);
}

bool RelayServer::tell(const Place& to, uint64_t token, const Deadline& deadline) {
  MutexLock lock(mutex_);
  for (;;) {
    if (const auto found = registered_.find(to); found != registered_.end()) {
      const ssize_t count = ::send(found->second, &token, sizeof token, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (count == sizeof token) return true;
      if (count > 0) ::shutdown(found->second, SHUT_RDWR);  // what follows would not begin with a token
    }
    if (deadline.passed()) return false;
    changed_.wait_for(lock.native(), std::chrono::milliseconds(100));
  }
}

void RelayServer::connect(FileDescriptor socket, const Place& to) {
  const Deadline deadline(kJoinTime);
  const auto awaited = std::make_shared<Awaited>();
  uint64_t token = 0;
  {
    const MutexLock lock(mutex_);
    token = ++last_token_;
    awaited_[token] = awaited;
  }
  FileDescriptor answer;
  const bool is_told = tell(to, token, deadline);
  {
    MutexLock lock(mutex_);
    while (is_told && !awaited->answer && !deadline.passed())
      changed_.wait_for(lock.native(), std::chrono::milliseconds(100));
    answer = std::move(awaited->answer);
    awaited_.erase(token);
  }
  if (answer_request(socket.get(), answer ? kRelayed : kNotRelayed) && answer) join(socket.get(), answer.get());
}

void RelayServer::bind(FileDescriptor socket, uint64_t token) {
  const int connection = socket.get();
  {
    const MutexLock lock(mutex_);
    if (!awaited_.contains(token)) {
      answer_request(connection, kNotRelayed);
      return;
    }
  }
  if (!answer_request(connection, kRelayed)) return;
  const MutexLock lock(mutex_);
  const auto found = awaited_.find(token);
  if (found == awaited_.end()) return;
  found->second->answer = std::move(socket);  // the thread that waits for it carries it
  changed_.notify_all();
}

}  // namespace lockstep::hosts
