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

/// Which of the connections that one port has accepted are no rank's, given those that the ranks say they have made.
Strangers find_strangers(const std::vector<Connection>& accepted, const std::vector<Connection>& made);

/// The port on which a group of Gloo is connected. Gloo listens there as long as the group lives, and takes whoever
/// comes for a rank. Here the kernel lets nobody in once all ranks are there, and whoever came before that is found:
/// each rank looks at its own sockets, and the ranks tell each other over their store what they have connected.
class DataPort {
 public:
  /// `open` lets Gloo begin to listen.
  explicit DataPort(const std::function<void()>& open);

  /// The connections that this process has made since then. Call it once Gloo has connected all ranks. Throws
  /// LimitError if no descriptor is left to look at them, since a connection that is not told of would be taken for a
  /// stranger's.
  std::vector<Connection> made() const;

  /// `made`: by all ranks of the group. From here on the port takes no connection, and those that no rank has made are
  /// shut down: if one of them has taken the place of a rank, the group's operations fail.
  /// Throws Error if the kernel does not take it.
  Strangers close(const std::vector<Connection>& made) const;

 private:
  /// One of this process's TCP sockets, by a descriptor of its own: the number of the other may become another's.
  struct Socket {
    FileDescriptor fd;
    bool listens = false;
    Connection ends;  ///< as seen from here: from this end
  };
  /// Calls `use` with each that has come since the beginning. Holds one more descriptor at a time.
  void for_each_new_socket(const std::function<void(Socket&&)>& use) const;

  std::unordered_set<unsigned long> before_;  ///< inodes
  std::vector<Socket> listeners_;             ///< Gloo's; others if the program began to listen at that very moment
};

}  // namespace lockstep
