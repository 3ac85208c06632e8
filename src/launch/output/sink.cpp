#include "launch/output/sink.h"

#include <fcntl.h>
#include <limits.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

namespace lockstep {
namespace {

constexpr size_t kFullBytes = 256 << 10;
constexpr size_t kTerminalBytes = 1 << 20;

bool is_writable(int fd) {
  pollfd polled{.fd = fd, .events = POLLOUT};
  return ::poll(&polled, 1, 0) > 0;
}

}  // namespace

Sink::Sink(int fd) : fd_(fd), is_terminal_(::isatty(fd) == 1) {
  // O_NONBLOCK belongs to the open file, which is shared with the parent process, so the file is opened again. If that
  // fails, pieces small enough for a pipe that poll calls writable are written.
  struct stat status {};
  if (!is_terminal_ && !(::fstat(fd, &status) == 0 && S_ISFIFO(status.st_mode))) return;
  const std::string path = "/proc/self/fd/" + std::to_string(fd);
  reopened_ = FileDescriptor(::open(path.c_str(), O_WRONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (reopened_) fd_ = reopened_.get();
}

bool Sink::full() const { return !is_terminal_ && !hung_ && queue_.size() >= kFullBytes; }

std::optional<Clock::time_point> Sink::due() const {
  if (!stuck_since_ || hung_) return std::nullopt;
  return *stuck_since_ + kPatience;
}

void Sink::check_patience(Clock::time_point now) {
  if (const auto at = due(); at && *at <= now) hung_ = true;
}

bool Sink::terminal_is_gone() const {
  pollfd polled{.fd = fd_, .events = 0};
  return is_terminal_ && ::poll(&polled, 1, 0) > 0 && (polled.revents & POLLHUP) != 0;
}

void Sink::write(std::string_view bytes) {
  if (bytes.empty()) return;
  at_line_start_ = bytes.back() == '\n';
  const size_t most = hung_ ? kFullBytes : is_terminal_ ? kTerminalBytes : std::string::npos;
  if (closed_ || bytes.size() > most || queue_.size() > most - bytes.size()) {
    dropped_bytes_ += bytes.size();
    return;
  }
  queue_.append(bytes);
  flush();
}

void Sink::start_line() {
  if (!at_line_start_) write("\n");
}

void Sink::flush() {
  size_t done = 0;
  while (done < queue_.size()) {
    if (!reopened_ && !is_writable(fd_)) break;
    const size_t most = reopened_ ? queue_.size() : PIPE_BUF;
    const ssize_t count = ::write(fd_, queue_.data() + done, std::min(queue_.size() - done, most));
    if (count < 0 && errno == EINTR) continue;
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) break;
    if (count < 0) {
      // A full disk may get room again; all other errors are final.
      closed_ = errno != ENOSPC && errno != EDQUOT && errno != EFBIG;
      dropped_bytes_ += queue_.size() - done;
      done = queue_.size();
    } else {
      done += static_cast<size_t>(count);
    }
  }
  queue_.erase(0, done);
  if (done > 0 || queue_.empty()) {
    stuck_since_.reset();
    hung_ = false;
  }
  if (!queue_.empty() && !stuck_since_) stuck_since_ = Clock::now();
}

}  // namespace lockstep
