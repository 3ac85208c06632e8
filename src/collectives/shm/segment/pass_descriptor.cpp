#include "collectives/shm/segment/pass_descriptor.h"

#include <poll.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

#include "base/error.h"
#include "base/file_descriptor.h"
#include "base/socket.h"

namespace lockstep {
namespace {

void wait_ready(int socket, short events, const Deadline& deadline, const char* what) {
  for (;;) {
    pollfd entry{socket, events, 0};
    const int ready = ::poll(&entry, 1, deadline.remaining_ms());
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_errno(what);
    if (deadline.passed()) throw Error(std::string(what) + ": timed out");
  }
}

[[noreturn]] void throw_hung_up(const char* what) {
  throw ConnectionClosed(std::string(what) + ": it closed the connection");
}

/// One sendmsg/recvmsg buffer with room for exactly one descriptor.
struct Envelope {
  explicit Envelope(std::span<std::byte> bytes) : part{bytes.data(), bytes.size()} {
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
  }
  iovec part;
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))] = {};
  msghdr header{};
};

}  // namespace

void send_descriptor(int socket, std::span<const std::byte> message, int descriptor, const Deadline& deadline) {
  const char* what = "passing a descriptor to a peer";
  auto rest = std::span(const_cast<std::byte*>(message.data()), message.size());
  bool with_descriptor = true;
  while (!rest.empty()) {
    wait_ready(socket, POLLOUT, deadline, what);
    Envelope envelope(rest);
    if (with_descriptor) {
      cmsghdr* control = CMSG_FIRSTHDR(&envelope.header);
      control->cmsg_level = SOL_SOCKET;
      control->cmsg_type = SCM_RIGHTS;
      control->cmsg_len = CMSG_LEN(sizeof(int));
      std::memcpy(CMSG_DATA(control), &descriptor, sizeof descriptor);
    } else {
      envelope.header.msg_control = nullptr;
      envelope.header.msg_controllen = 0;
    }
    const ssize_t sent = ::sendmsg(socket, &envelope.header, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (sent < 0 && (errno == EPIPE || errno == ECONNRESET)) throw_hung_up(what);
    if (sent < 0) throw_errno(what);
    with_descriptor = false;
    rest = rest.subspan(static_cast<size_t>(sent));
  }
}

FileDescriptor receive_descriptor(int socket, std::span<std::byte> message, const Deadline& deadline) {
  const char* what = "receiving a descriptor from a peer";
  FileDescriptor received;
  for (auto rest = message; !rest.empty();) {
    wait_ready(socket, POLLIN, deadline, what);
    Envelope envelope(rest);
    const ssize_t count = ::recvmsg(socket, &envelope.header, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count == 0 || (count < 0 && errno == ECONNRESET)) throw_hung_up(what);
    if (count < 0) throw_errno(what);
    for (cmsghdr* control = CMSG_FIRSTHDR(&envelope.header); control;
         control = CMSG_NXTHDR(&envelope.header, control)) {
      if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
      int descriptor = -1;
      std::memcpy(&descriptor, CMSG_DATA(control), sizeof descriptor);
      received = FileDescriptor(descriptor);
    }
    // The kernel drops a descriptor for which this process has no free number, and reports it.
    if (!received && (envelope.header.msg_flags & MSG_CTRUNC) != 0) {
      errno = EMFILE;
      throw_errno_or_limit(what);
    }
    rest = rest.subspan(static_cast<size_t>(count));
  }
  if (!received) throw Error(std::string(what) + ": no descriptor came with the message");
  return received;
}

}  // namespace lockstep
