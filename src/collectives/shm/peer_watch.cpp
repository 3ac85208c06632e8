#include "collectives/shm/peer_watch.h"

#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace lockstep::shm {

PeerWatch::PeerWatch(FileDescriptor socket, pid_t pid, std::string host)
    : socket_(std::move(socket)), pid_(pid), host_(std::move(host)) {
#ifdef SYS_pidfd_open
  // Close-on-exec by definition. Failure (an old kernel) leaves the socket.
  if (pid > 0 && pid != ::getpid()) process_ = FileDescriptor(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#endif
}

bool PeerWatch::gone() const {
  pollfd entries[] = {{socket_.get(), POLLIN | POLLRDHUP, 0}, {process_.get(), POLLIN, 0}};
  return ::poll(entries, 2, 0) > 0;
}

std::string PeerWatch::text() const { return "pid " + std::to_string(pid_) + " on " + host_; }

}  // namespace lockstep::shm
