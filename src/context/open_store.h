#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/world.h"

namespace lockstep {

/// Connects this process to the key-value store that all ranks of `world` share: the launcher's, torchrun's TCPStore,
/// or one that rank 0 serves. Returns an undefined pointer for a world of one. Every wait in the store ends after
/// `timeout`. Throws Error if the store cannot be reached in time. Connects once: later calls for the same world return
/// the same store, which this process keeps (and serves, if it is the server) until it ends.
c10::intrusive_ptr<c10d::Store> open_store(const World& world, std::chrono::milliseconds timeout);

/// Makes the next open_store() connect again, because the server is gone.
void forget_store();

/// The address of this machine on the route to `world`'s store, to which the other machines can connect. The loopback
/// address if all ranks are on this machine.
std::string local_address(const World& world);

}  // namespace lockstep
