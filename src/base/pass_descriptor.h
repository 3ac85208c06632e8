#pragma once

#include <cstddef>
#include <span>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// Sends `message` (whole, a few hundred bytes at most) and one descriptor over a connected Unix stream socket.
/// Throws Error when the peer is gone or `deadline` passes.
void send_descriptor(int socket, std::span<const std::byte> message, int descriptor, const Deadline& deadline);

/// Receives exactly `message.size()` bytes and the one descriptor sent with them, CLOEXEC. Throws Error when the peer
/// is gone, sent no descriptor, or `deadline` passes.
FileDescriptor receive_descriptor(int socket, std::span<std::byte> message, const Deadline& deadline);

}  // namespace lockstep
