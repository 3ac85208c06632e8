#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <utility>

#include "base/file_descriptor.h"
#include "base/mutex.h"
#include "hosts/relay_request.h"

namespace lockstep::hosts {

/// Joins connections of machines that cannot connect to each other: one of each machine, both of which they have opened
/// to this one.
class RelayServer {
 public:
  /// Carries out a request that has proved the key, and returns when its connection is over. Each call is on a thread
  /// of its own.
  void serve(FileDescriptor socket, const RelayRequest& request);

 private:
  using Place = std::pair<uint32_t, uint32_t>;  // a start, and a machine of it
  /// A connection that waits for the other machine's.
  struct Awaited {
    FileDescriptor answer;
  };

  void keep_registered(const FileDescriptor& socket, const Place& place);
  void connect(FileDescriptor socket, const Place& to);
  void bind(FileDescriptor socket, uint64_t token);
  /// Tells the machine of a connection to answer, once it is registered. Returns false at the deadline.
  bool tell(const Place& to, uint64_t token, const Deadline& deadline);

  Mutex mutex_;
  std::condition_variable changed_;
  std::map<Place, int> registered_ LOCKSTEP_GUARDED_BY(mutex_);  // sockets
  std::map<uint64_t, std::shared_ptr<Awaited>> awaited_ LOCKSTEP_GUARDED_BY(mutex_);
  uint64_t last_token_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
};

/// Moves bytes both ways between two connections until both directions have ended, or one connection is broken.
void join(int one, int other);

}  // namespace lockstep::hosts
