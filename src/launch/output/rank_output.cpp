#include "launch/output/rank_output.h"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "launch/launch_error.h"

namespace lockstep {

FileDescriptor RankOutput::open(Stream& stream) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0)
    throw LaunchError(kExitResourceLimit, std::string("making a pipe: ") + std::strerror(errno));
  stream.pipe = FileDescriptor(ends[0]);
  ::fcntl(ends[0], F_SETFL, O_NONBLOCK);  // our end only: the rank's stays blocking
  return FileDescriptor(ends[1]);
}

void RankOutput::read(Stream& stream) {
  std::array<char, 64 << 10> piece;
  const ssize_t count = ::read(stream.pipe.get(), piece.data(), piece.size());
  if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) return;
  const std::string_view bytes(piece.data(), count > 0 ? static_cast<size_t>(count) : 0);
  if (bytes.empty()) stream.pipe.reset();
  if (forward_) return forward_(static_cast<size_t>(&stream - streams_.data()), bytes);
  if (!bytes.empty()) return take(stream, bytes);
  std::string lines;
  stream.lines.finish(lines);
  keep(stream, lines);
}

void RankOutput::take(Stream& stream, std::string_view bytes) {
  std::string lines;
  if (stream.sink != nullptr && stream.merger == nullptr) stream.sink->write(bytes);
  stream.lines.feed(bytes, lines);
  keep(stream, lines);
}

void RankOutput::finish() {
  for (auto& stream : streams_) {
    // No more than the pipe holds now, because a process that left the rank's group may still be writing.
    int held = 0;
    if (stream.pipe) ::ioctl(stream.pipe.get(), FIONREAD, &held);
    for (int taken = 0; stream.pipe && taken < held; taken += 4096) read(stream);
    std::string lines;
    stream.lines.finish(lines);
    keep(stream, lines);
    stream.pipe.reset();
  }
}

void RankOutput::keep(Stream& stream, std::string_view lines) {
  tail_.add(lines);
  log_.add(lines);
  if (stream.merger != nullptr) stream.merger->add(rank_, lines, Clock::now());
}

}  // namespace lockstep
