#pragma once

#include <cstddef>
#include <span>

#include "base/clock.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// Sends `message` (whole, a few hundred bytes at most) and one descriptor over a connected Unix stream socket.
/// Throws ConnectionClosed when the peer is gone, Error when `deadline` passes.
void send_descriptor(int socket, std::span<const std::byte> message, int descriptor, const Deadline& deadline);

/// Receives exactly `message.size()` bytes and the one descriptor sent with them, CLOEXEC. Throws ConnectionClosed when
/// the peer is gone, LimitError when this process may open no more descriptors, Error when none was sent or `deadline`
/// passes.
FileDescriptor receive_descriptor(int socket, std::span<std::byte> message, const Deadline& deadline);

}  // namespace lockstep
