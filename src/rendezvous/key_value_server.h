#pragma once

#include <poll.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/file_descriptor.h"
#include "rendezvous/key_value_frame.h"

namespace lockstep {

/// A key-value store for the ranks of one machine, with the semantics of c10d::Store, served over connected stream
/// sockets. Passive: it has no thread and never waits. Its owner polls the descriptors that append_polled() adds, and
/// passes the results to handle(). Used by one thread at a time.
///
/// A client that breaks the protocol or its limits is dropped, with a reason, without affecting the others. A client
/// that merely asks for too much (a value over the limit, a full store) gets an error as its answer.
class KeyValueServer {
 public:
  struct Dropped {
    int client;
    std::string reason;  ///< empty for the normal end: it closed its end, not inside a request
  };

  /// Serves the process at the other end of `socket` from now on. Returns the client's number: 0, 1, 2, ...
  int add_client(FileDescriptor socket);

  /// Appends one entry for each client.
  void append_polled(std::vector<pollfd>& polled) const;

  /// Serves the client of `ready`. Ignores entries without events, and descriptors that are not, or no longer, a
  /// client's.
  void handle(const pollfd& ready);

  /// Clients that have gone since the last call.
  std::vector<Dropped> take_dropped();

 private:
  /// A get or wait whose keys do not all exist yet.
  struct Parked {
    uint32_t id;
    KeyValueRequest request;
    std::vector<std::string> keys;
  };
  struct Client {
    int number;
    FileDescriptor socket;
    std::string inbox;   ///< received so far: the start of a frame
    std::string outbox;  ///< replies the socket has not taken yet; nothing more is read until it has
    std::vector<Parked> parked;
  };

  /// Returns false when the client has closed its end.
  bool receive(Client& client);
  /// Answers the requests in the inbox.
  void serve(Client& client);
  /// Sends as much of the outbox as the socket accepts.
  void flush(Client& client);
  void answer_request(Client& client, const KeyValueFrame& frame);
  void park(Client& client, uint32_t id, KeyValueRequest request, const std::vector<std::string_view>& keys);
  void cancel(Client& client, uint32_t id);
  void store(std::string_view key, std::string value);
  bool answer_if_complete(Client& client, const Parked& parked);
  void drop(int fd, std::string reason);

  std::map<int, Client> clients_;  // by descriptor
  std::unordered_map<std::string, std::string> values_;
  size_t stored_bytes_ = 0;
  int next_client_ = 0;
  std::vector<Dropped> dropped_;
};

}  // namespace lockstep
