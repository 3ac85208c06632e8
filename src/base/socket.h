#pragma once

#include <cstddef>
#include <string>

#include "base/clock.h"
#include "base/error.h"
#include "base/file_descriptor.h"

namespace lockstep {

/// Unix stream sockets between processes of one machine. Every socket made here is closed on exec. No call raises
/// SIGPIPE, and none waits past its deadline, whether or not the socket is in blocking mode.

/// Thrown by send_all and receive_all when the other side has closed the connection.
class ConnectionClosed : public Error {
 public:
  using Error::Error;
};

struct SocketPair {
  FileDescriptor first;
  FileDescriptor second;
};

/// Two connected ends.
SocketPair make_socket_pair();

/// Sends all `size` bytes. Throws ConnectionClosed when the peer is gone, and Error when the deadline passes first;
/// some bytes may then have been sent, so the connection can no longer be used.
void send_all(int socket, const void* data, size_t size, const Deadline& deadline);

/// Receives exactly `size` bytes; throws like send_all.
void receive_all(int socket, void* data, size_t size, const Deadline& deadline);

/// Receives available bytes: waits for at least one byte, and returns at most `size`. Returns 0 at the deadline; throws
/// ConnectionClosed when the peer is gone.
size_t receive_some(int socket, void* data, size_t size, const Deadline& deadline);

/// A listening socket with an abstract address, a name that exists only in the kernel and vanishes with the socket.
struct UnixListener {
  FileDescriptor socket;
  std::string name;
};
/// Listens under `name`, or under a free name that the kernel chooses; throws Error if another socket has the name.
UnixListener listen_unix(const std::string& name = {});

/// Connects to the socket that listens under `name`. Throws Error if no process does, or one of another user.
FileDescriptor connect_unix(const std::string& name);

/// Accepts one waiting connection. Empty when none waits, or when the peer is a process of another user.
FileDescriptor accept_same_user(int listener);

}  // namespace lockstep
