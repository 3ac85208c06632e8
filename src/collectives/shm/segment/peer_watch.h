#pragma once

#include <sys/types.h>

#include <memory>
#include <string>

#include "base/file_descriptor.h"

namespace lockstep::shm {

/// Notices the end of another rank's process.
///
/// It polls a pidfd, which all watches over that process share, so that another group costs no descriptor. If the
/// kernel has no pidfd for it (an old kernel, another PID namespace), it polls for the hang-up of a socket that both
/// hold and never use. The hang-up comes late if a child forked by the rank keeps the socket open.
class PeerWatch {
 public:
  PeerWatch() = default;
  /// `pid` is the peer's as seen from here (0: not visible). A process does not watch itself.
  /// REQUIRES: the peer is alive.
  PeerWatch(pid_t pid, std::string host);
  /// `socket` is connected to the peer.
  PeerWatch(FileDescriptor socket, pid_t pid, std::string host) : PeerWatch(pid, std::move(host)) {
    watch_socket(std::move(socket));
  }
  void watch_socket(FileDescriptor socket) { socket_ = std::move(socket); }
  bool watches_process() const { return process_ != nullptr; }

  /// The number of processes that all watches of this process watch together.
  static size_t watched_processes();

  /// Never blocks. True once the peer has ended or closed its side.
  bool gone() const;
  pid_t pid() const { return pid_; }
  /// "pid 4711 on host a".
  std::string text() const;

 private:
  FileDescriptor socket_;
  std::shared_ptr<const FileDescriptor> process_;
  pid_t pid_ = 0;
  std::string host_;
};

}  // namespace lockstep::shm
