#include "hosts/link_sockets.h"

#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <thread>

namespace lockstep::hosts {

sockaddr_in socket_address(uint32_t address, uint16_t port) {
  sockaddr_in result{};
  result.sin_family = AF_INET;
  result.sin_port = htons(port);
  result.sin_addr.s_addr = htonl(address);
  return result;
}

void set_on(int socket, int level, int option) {
  const int on = 1;
  ::setsockopt(socket, level, option, &on, sizeof on);
}

void keep_alive(int socket) {
  set_on(socket, SOL_SOCKET, SO_KEEPALIVE);
  const int idle = 2, between = 1, most = 4;
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &idle, sizeof idle);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &between, sizeof between);
  ::setsockopt(socket, IPPROTO_TCP, TCP_KEEPCNT, &most, sizeof most);
}

bool is_unanswered(int socket) {
  constexpr uint32_t kSilenceMs = 6000;
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  return info.tcpi_unacked > 0 && info.tcpi_retransmits >= 3 && info.tcpi_last_ack_recv >= kSilenceMs;
}

FileDescriptor tcp_socket() { return FileDescriptor(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)); }

FileDescriptor accepted_from(int listener) {
  FileDescriptor socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  // Without a free descriptor the connection stays in the queue, and poll() returns at once.
  if (!socket && (errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS))
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  return socket;
}

void OpenSockets::add(int socket) {
  const MutexLock lock(mutex_);
  if (over_) ::shutdown(socket, SHUT_RDWR);
  sockets_.push_back(socket);
}

void OpenSockets::remove(int socket) {
  const MutexLock lock(mutex_);
  sockets_.remove(socket);
}

void OpenSockets::shut_all() {
  const MutexLock lock(mutex_);
  over_ = true;
  for (const int socket : sockets_) ::shutdown(socket, SHUT_RDWR);
}

void OpenSockets::shut_down_to(size_t most) {
  const MutexLock lock(mutex_);
  for (; sockets_.size() > most; sockets_.pop_front()) ::shutdown(sockets_.front(), SHUT_RDWR);
}

}  // namespace lockstep::hosts
