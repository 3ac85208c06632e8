#pragma once

#include <chrono>
#include <memory>

#include "collectives/shm/segment/world.h"
#include "rendezvous/world.h"

namespace lockstep::c {

/// The world described by the environment. Throws StatusError unless all of its ranks are on this machine.
World discover_world_of_one_machine(const Environment& environment);

struct Meeting {
  shm::World world;
  /// The store in which the ranks have met. It must be kept until all of them have returned from meet(), because one of
  /// them may serve the others.
  std::shared_ptr<void> store;
};

/// Forms the group of all ranks of `world`. Throws Error naming the ranks that do not arrive in time.
/// REQUIRES: all of them call it.
Meeting meet(const World& world, const Environment& environment, std::chrono::milliseconds timeout);

}  // namespace lockstep::c
