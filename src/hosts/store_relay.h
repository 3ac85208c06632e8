#pragma once

#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "base/file_descriptor.h"
#include "launch/poll_set.h"

namespace lockstep::hosts {

/// Relays the ranks' connections to the key-value store over channels. On each side a rank has its own socket, whose
/// output goes to the other side as messages.
class StoreRelay {
 public:
  /// A rank's bytes for the other side; none: its connection has ended.
  using Send = std::function<void(int rank, std::string_view bytes)>;

  explicit StoreRelay(Send send) : send_(std::move(send)) {}

  void add(int rank, FileDescriptor socket);
  /// `may_send` tells whether the rank's channel accepts more now.
  void watch(PollSet& polled, const std::function<bool(int rank)>& may_send);
  /// Delivers bytes from the other side; none means that its connection has ended.
  void deliver(int rank, std::string_view bytes);

 private:
  struct Connection {
    FileDescriptor socket;
    std::string queue;  ///< bytes that the socket has not accepted yet
  };

  void serve(int rank, short events);
  void flush(int rank, Connection& connection);

  Send send_;
  std::map<int, Connection> connections_;  // by rank
};

}  // namespace lockstep::hosts
