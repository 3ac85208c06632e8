#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "rendezvous/key_value_server_thread.h"

namespace lockstep {

/// Connects ranks of one machine that share no inherited socket. Rank 0 serves a key-value store under an abstract Unix
/// address, a name that exists only in the kernel and vanishes with the process; the others connect to it. Both sides
/// check that the other is a process of the same user.
struct LocalRendezvous {
  FileDescriptor socket;                         ///< connected to the store
  std::unique_ptr<KeyValueServerThread> server;  ///< on rank 0
};

/// `job` is a text that is equal for ranks that belong together, and for no others. Throws Error if another process has
/// the name, or if rank 0 is missing at the deadline.
LocalRendezvous rendezvous_on_this_machine(const std::string& job, int rank, const Deadline& deadline);

/// The socket to the launcher's store that this process inherited. Throws Error if a process between the launcher and
/// this one has closed it.
FileDescriptor inherited_store_socket(int fd);

}  // namespace lockstep
