#include "rendezvous/local_rendezvous.h"

#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/error.h"
#include "base/socket.h"

namespace lockstep {

FileDescriptor inherited_store_socket(int fd) {
  int domain = 0;
  socklen_t length = sizeof domain;
  const bool is_open = ::getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) == 0 || errno != EBADF;
  if (domain != AF_UNIX)
    throw Error(
        "LOCKSTEP_STORE_FD=" + std::to_string(fd) + " is " + (is_open ? "not a socket of `lockstep run`" : "not open") +
        "; start the program with `lockstep run`, without a program in between that closes descriptors (such as sudo), "
        "or unset LOCKSTEP_STORE_FD");
  return FileDescriptor(fd);
}

LocalRendezvous rendezvous_on_this_machine(const std::string& job, int rank, const Deadline& deadline) {
  const std::string name = "lockstep-" + std::to_string(::geteuid()) + "-" + job;
  if (rank == 0) {
    auto server = std::make_unique<KeyValueServerThread>(listen_unix(name).socket);
    FileDescriptor socket = server->connect();
    return {std::move(socket), std::move(server)};
  }
  for (std::chrono::microseconds pause(200);;
       pause = std::min<std::chrono::microseconds>(2 * pause, std::chrono::milliseconds(5))) {
    try {
      return {connect_unix(name), nullptr};
    } catch (const Error& error) {
      if (deadline.passed())
        throw Error("rank " + std::to_string(rank) + " found no rank 0 on this machine in time (" + error.what() +
                    "); see the output of rank 0 for the reason, or raise LOCKSTEP_JOIN_TIMEOUT_S if it starts slowly; "
                    "it must run in the same network namespace");
    }
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace lockstep
