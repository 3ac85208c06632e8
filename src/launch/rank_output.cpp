#include "launch/rank_output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep {

FileDescriptor RankOutput::open(Stream& stream, Sink* sink) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw LaunchError(kExitResourceLimit, std::string("making a pipe: ") + std::strerror(errno));
  stream.pipe = FileDescriptor(ends[0]);
  stream.sink = sink;
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);  // our end only: the rank's stays an ordinary, blocking one
  return FileDescriptor(ends[1]);
}

void RankOutput::read(Stream& stream) {
  std::array<char, 64 << 10> piece;
  const ssize_t count = ::read(stream.pipe.get(), piece.data(), piece.size());
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  std::string lines;
  if (count <= 0) {
    stream.pipe.reset();
    stream.lines.finish(lines);
  } else {
    const std::string_view bytes(piece.data(), static_cast<size_t>(count));
    if (stream.sink != nullptr) stream.sink->write(bytes);
    stream.lines.feed(bytes, lines);
  }
  keep(lines);
}

void RankOutput::finish() {
  for (auto& stream : streams_) {
    // No more than the pipe holds now: a process that has left the rank's group may still be writing.
    int held = 0;
    if (stream.pipe) ::ioctl(stream.pipe.get(), FIONREAD, &held);
    for (int taken = 0; stream.pipe && taken < held; taken += 4096) read(stream);
    std::string lines;
    stream.lines.finish(lines);
    keep(lines);
    stream.pipe.reset();
  }
}

void RankOutput::keep(std::string_view lines) {
  if (lines.empty()) return;
  tail_.add(lines);
  if (!log_) log_ = FileDescriptor(::open(log_path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666));
  if (!log_) return drop(lines);
  while (!lines.empty()) {
    const ssize_t count = ::write(log_.get(), lines.data(), lines.size());
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) return drop(lines);
    lines.remove_prefix(static_cast<size_t>(count));
  }
}

void RankOutput::drop(std::string_view lines) {
  if (drop_reason_.empty()) drop_reason_ = std::strerror(errno);
  dropped_lines_ += static_cast<size_t>(std::count(lines.begin(), lines.end(), '\n'));
}

}  // namespace lockstep
