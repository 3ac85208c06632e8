#include "hosts/node.h"

#include <unistd.h>

#include <array>
#include <cerrno>

namespace lockstep::hosts {

std::string Node::read_output() {
  std::array<char, 4096> piece;
  std::string found;
  for (;;) {
    const ssize_t count = ::read(output.get(), piece.data(), piece.size());
    if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
    if (count <= 0) {
      lines.finish(found);
      output.reset();
      break;
    }
    lines.feed({piece.data(), static_cast<size_t>(count)}, found);
  }
  tail.add(found);
  return found;
}

void Node::lose() {
  channel.reset();
  ready.reset();
  address.clear();
  if (process && guard != nullptr) guard->forget(process->pid());
  process.reset();
  process_end.reset();
  output.reset();
}

}  // namespace lockstep::hosts
