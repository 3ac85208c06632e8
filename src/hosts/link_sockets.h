#pragma once

#include <netinet/in.h>

#include <list>

#include "base/file_descriptor.h"
#include "base/mutex.h"

namespace lockstep::hosts {

/// `address` and `port` in host byte order.
sockaddr_in socket_address(uint32_t address, uint16_t port);
void set_on(int socket, int level, int option);
/// Asks the other side every 2 s whether it is there, and gives the connection up after 4 questions without an answer.
/// Routers forget connections that are silent for some minutes. The kernel asks nothing while sent data is unanswered;
/// see is_unanswered().
void keep_alive(int socket);
/// Whether data that was sent has been repeated for 6 s or more without an answer. A receiver that reads nothing
/// answers.
bool is_unanswered(int socket);
FileDescriptor tcp_socket();
/// A waiting connection, non-blocking; empty if there is none, or no descriptor for it.
FileDescriptor accepted_from(int listener);

/// Sockets that another thread may shut down.
class OpenSockets {
 public:
  void add(int socket);
  /// Must be called before the socket is closed.
  void remove(int socket);
  /// Also those that are added later.
  void shut_all();
  /// Shuts down those that were added first, until at most `most` are left.
  void shut_down_to(size_t most);

 private:
  Mutex mutex_;
  bool over_ LOCKSTEP_GUARDED_BY(mutex_) = false;
  std::list<int> sockets_ LOCKSTEP_GUARDED_BY(mutex_);
};

class Registered {
 public:
  Registered(OpenSockets& all, int socket, bool is_added = false) : all_(all), socket_(socket) {
    if (!is_added) all_.add(socket);
  }
  ~Registered() { all_.remove(socket_); }
  Registered(const Registered&) = delete;
  Registered& operator=(const Registered&) = delete;

 private:
  OpenSockets& all_;
  const int socket_;
};

}  // namespace lockstep::hosts
