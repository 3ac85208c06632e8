#pragma once

#include <chrono>

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "rendezvous/world.h"

namespace lockstep {

/// Connects this process to the key-value store that all ranks of `world` share: the launcher's, torchrun's TCPStore,
/// or one that rank 0 serves. Undefined for a world of one. Every wait in the store ends after `timeout`.
/// Throws Error if it cannot be reached in time. Connects once: later calls for the same world get the same store,
/// which this process keeps, and serves if it does, until it ends.
c10::intrusive_ptr<c10d::Store> open_store(const World& world, std::chrono::milliseconds timeout);

/// The next open_store connects anew: the server that was found has gone.
void forget_store();

/// The address of this machine from which `world`'s store is reached: what other machines can connect to, if there
/// are any; the loopback address if all ranks are here.
std::string local_address(const World& world);

}  // namespace lockstep
