#include "rendezvous/local_rendezvous.h"

#include <unistd.h>

#include <thread>

#include "base/error.h"
#include "base/socket.h"

namespace lockstep {

LocalRendezvous rendezvous_on_this_machine(const std::string& job, int rank, const Deadline& deadline) {
  const std::string name = "lockstep-" + std::to_string(::geteuid()) + "-" + job;
  if (rank == 0) {
    auto server = std::make_unique<KeyValueServerThread>(listen_unix(name).socket);
    FileDescriptor socket = server->connect();
    return {std::move(socket), std::move(server)};
  }
  for (;;) {
    try {
      return {connect_unix(name), nullptr};
    } catch (const Error& error) {
      if (deadline.passed())
        throw Error("rank " + std::to_string(rank) + " found no rank 0 on this machine in time (" + error.what() +
                    "); see the output of rank 0 for the reason, or raise LOCKSTEP_JOIN_TIMEOUT_S if it starts slowly; "
                    "it must run in "
                    "the same network namespace");
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

}  // namespace lockstep
