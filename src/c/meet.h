#pragma once

#include <chrono>
#include <memory>

#include "collectives/shm/segment/world.h"
#include "rendezvous/world.h"

namespace lockstep::c {

/// The world that the environment describes; throws StatusError unless all of its ranks are on this machine.
World discover_world_of_one_machine(const Environment& environment);

struct Meeting {
  shm::World world;
  /// Where the ranks have met. To be kept until all of them have returned from meet(): one of them may serve the
  /// others.
  std::shared_ptr<void> store;
};

/// Forms the group of all ranks of `world`, which all call it. Throws Error naming the ranks that do not come in time.
Meeting meet(const World& world, const Environment& environment, std::chrono::milliseconds timeout);

}  // namespace lockstep::c
