#include "workers/line_channel.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace lockstep::bench {

LineChannel::LineChannel(LineChannel&& other) noexcept
    : fd_(std::exchange(other.fd_, -1)), buffer_(std::move(other.buffer_)) {}

LineChannel::~LineChannel() {
  if (fd_ >= 0) close(fd_);
}

LineChannel LineChannel::connect(const std::string& path) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.size() >= sizeof(address.sun_path)) throw std::runtime_error("socket path too long: " + path);
  std::strcpy(address.sun_path, path.c_str());
  LineChannel channel(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (channel.fd_ < 0 || ::connect(channel.fd_, reinterpret_cast<sockaddr*>(&address), sizeof(address)) != 0)
    throw std::runtime_error("cannot reach " + path + ": " + std::strerror(errno));
  return channel;
}

bool LineChannel::send(const std::string& line) {
  const std::string text = line + '\n';
  for (size_t sent = 0; sent < text.size();) {
    const ssize_t n = ::send(fd_, text.data() + sent, text.size() - sent, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    sent += static_cast<size_t>(n);
  }
  return true;
}

std::optional<std::string> LineChannel::receive(std::optional<std::chrono::milliseconds> timeout) {
  using Clock = std::chrono::steady_clock;
  const auto deadline = Clock::now() + timeout.value_or(std::chrono::milliseconds(0));
  while (true) {
    if (const size_t end = buffer_.find('\n'); end != std::string::npos) {
      std::string line = buffer_.substr(0, end);
      buffer_.erase(0, end + 1);
      return line;
    }
    int wait_ms = -1;
    if (timeout) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now()).count();
      wait_ms = static_cast<int>(std::max<int64_t>(left, 0));
    }
    pollfd ready{fd_, POLLIN, 0};
    const int events = poll(&ready, 1, wait_ms);
    if (events < 0 && errno == EINTR) continue;
    if (events <= 0) return std::nullopt;
    char bytes[4096];
    const ssize_t n = read(fd_, bytes, sizeof(bytes));
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return std::nullopt;
    buffer_.append(bytes, static_cast<size_t>(n));
  }
}

int LineChannel::peer_pid() const {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  if (getsockopt(fd_, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0) return -1;
  return credentials.pid;
}

}  // namespace lockstep::bench
