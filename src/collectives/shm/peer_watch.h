#pragma once

#include <sys/types.h>

#include <string>

#include "base/file_descriptor.h"

namespace lockstep::shm {

/// Notices the end of another rank's process.
///
/// By the hang-up of the socket that both hold, on which nothing is ever sent, and by a descriptor of the process
/// where the kernel gives one: a child the rank forked may hold the socket open long after the rank was killed.
class PeerWatch {
 public:
  PeerWatch() = default;
  /// `socket` is connected to the peer, `pid` is the peer's as seen from here (0: not visible).
  PeerWatch(FileDescriptor socket, pid_t pid, std::string host);

  /// Never blocks. True once the peer has ended or closed its side.
  bool gone() const;
  pid_t pid() const { return pid_; }
  /// "pid 4711 on host a".
  std::string text() const;

 private:
  FileDescriptor socket_;
  FileDescriptor process_;
  pid_t pid_ = 0;
  std::string host_;
};

}  // namespace lockstep::shm
