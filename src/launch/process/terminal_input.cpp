#include "launch/process/terminal_input.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep {

TerminalInput::TerminalInput(int terminal, FileDescriptor& rank_end) : terminal_(terminal) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw LaunchError(kExitResourceLimit, std::string("making a pipe: ") + std::strerror(errno));
  rank_end = FileDescriptor(ends[0]);
  pipe_ = FileDescriptor(ends[1]);
  ::fcntl(pipe_.get(), F_SETFL, O_NONBLOCK);
}

int TerminalInput::fd() const {
  if (!pipe_) return -1;
  if (!queue_.empty()) return pipe_.get();
  return in_background_ ? -1 : terminal_;
}

short TerminalInput::events() const { return queue_.empty() ? POLLIN : POLLOUT; }

void TerminalInput::pass_on() {
  if (queue_.empty()) {
    const pid_t foreground = ::tcgetpgrp(terminal_);
    if (foreground < 0) return pipe_.reset();  // the terminal has been closed
    if (foreground != ::getpgrp()) {
      in_background_ = true;
      return;
    }
    std::array<char, 4096> piece;
    const ssize_t count = ::read(terminal_, piece.data(), piece.size());
    if (count < 0 && errno == EINTR) return;
    if (count <= 0) return pipe_.reset();  // the end of the input, or of the terminal
    queue_.assign(piece.data(), static_cast<size_t>(count));
  }
  const ssize_t count = ::write(pipe_.get(), queue_.data(), queue_.size());
  if (count >= 0)
    queue_.erase(0, static_cast<size_t>(count));
  else if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
    pipe_.reset();  // rank 0 has closed its input
}

}  // namespace lockstep
