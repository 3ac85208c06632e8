#pragma once

#include <thread>
#include <vector>

#include "base/file_descriptor.h"
#include "base/mutex.h"

namespace lockstep {

/// Runs a KeyValueServer on its own thread until it is destroyed, which closes every client's connection.
class KeyValueServerThread {
 public:
  /// With a `listener` (see listen_unix), serves every process of the same user that connects to it.
  explicit KeyValueServerThread(FileDescriptor listener = {});
  ~KeyValueServerThread();

  /// Serves the process at the other end of `socket`. Any thread may call, at any time.
  void add_client(FileDescriptor socket);
  /// Makes a socket pair, serves one end and returns the other.
  FileDescriptor connect();

 private:
  void serve();
  void wake();

  FileDescriptor listener_;
  FileDescriptor wake_;  // an eventfd
  Mutex mutex_;
  std::vector<FileDescriptor> arrived_ LOCKSTEP_GUARDED_BY(mutex_);
  bool stop_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::thread thread_;  // last: it uses all the others
};

}  // namespace lockstep
