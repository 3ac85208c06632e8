#pragma once

#include <functional>
#include <string>
#include <unordered_set>
#include <vector>

#include "base/file_descriptor.h"

namespace lockstep {

/// A TCP connection, each end as "10.0.0.2:41234" or "[fd00::2]:41234".
struct Connection {
  std::string from;  ///< the end that connected
  std::string to;    ///< the end that listened
  bool operator==(const Connection&) const = default;
};

/// Connections that close() found.
struct Strangers {
  std::vector<Connection> shut_down;
  std::vector<Connection> untold;  ///< left alone: the network translates addresses, so these may be ranks
};

/// The connections accepted by one port that no rank made, given the connections that the ranks report.
Strangers find_strangers(const std::vector<Connection>& accepted, const std::vector<Connection>& made);

/// The port on which a Gloo group connects. Gloo listens there as long as the group lives, and takes any connection for
/// a rank. This class makes the kernel refuse connections once all ranks are connected, and finds strangers that
/// connected earlier: each rank inspects its own sockets, and ranks exchange over their store the connections that they
/// have made.
class DataPort {
 public:
  /// `open` makes Gloo listen.
  explicit DataPort(const std::function<void()>& open);

  /// Where it listens.
  std::vector<std::string> ends() const;

  /// The connections that this process has made since construction. Throws LimitError if no descriptor is left to
  /// inspect them, since an unreported connection would be taken for a stranger's.
  std::vector<Connection> made() const;

  /// Closes the port to new connections and shuts down those that no rank has made. If one of these has taken a rank's
  /// place, the group's operations fail. `made` holds the connections that all ranks of the group have made. Throws
  /// Error if the kernel refuses.
  Strangers close(const std::vector<Connection>& made) const;

 private:
  /// One of this process's TCP sockets, duplicated: the original descriptor's number may be reused.
  struct Socket {
    FileDescriptor fd;
    bool listens = false;
    Connection ends;  ///< as seen from here: from this end
  };
  /// Calls `use` with each socket opened since construction. Holds one extra descriptor at a time.
  void for_each_new_socket(const std::function<void(Socket&&)>& use) const;

  std::unordered_set<unsigned long> before_;  ///< inodes
  std::vector<Socket> listeners_;             ///< Gloo's, and others if the program began to listen at that very moment
};

}  // namespace lockstep
