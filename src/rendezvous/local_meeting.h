#pragma once

#include <memory>
#include <string>

#include "base/clock.h"
#include "base/file_descriptor.h"
#include "rendezvous/key_value_server_thread.h"

namespace lockstep {

/// How ranks of one machine that share no inherited socket find each other: rank 0 serves a key-value store under a
/// name that only the kernel keeps (an abstract Unix address, gone with the process) and the others connect to it.
/// Both sides make sure that the other is a process of the same user.
struct LocalMeeting {
  FileDescriptor socket;                         ///< connected to the store
  std::unique_ptr<KeyValueServerThread> server;  ///< on rank 0
};

/// `job` is the same text for the ranks that belong together and for nobody else. Throws Error if another process
/// holds the name, or if rank 0 has not come before the deadline.
LocalMeeting meet_on_this_machine(const std::string& job, int rank, const Deadline& deadline);

}  // namespace lockstep
