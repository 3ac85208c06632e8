#pragma once

#include <lockstep/c.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/shared_segment.h"
#include "c/memory.h"
#include "collectives/call_guard.h"
#include "collectives/shm/group.h"

namespace lockstep::c {

/// What a handle of a group and its requests share.
struct GroupState {
  GroupState(shm::World world, std::chrono::milliseconds timeout_, bool is_world_)
      : group(std::move(world)), timeout(timeout_), is_world(is_world_) {}

  shm::Group group;
  const std::chrono::milliseconds timeout;
  const bool is_world;
  const unsigned generation = fork_generation();  ///< of the process that has the group's memory
  CurrentCaller caller;
  HandedOut handed_out;
};

}  // namespace lockstep::c

/// Its memory is never given back, so that a call after lockstep_leave() is an error and not undefined.
struct lockstep_group {
  std::shared_ptr<lockstep::c::GroupState> state;  ///< null once the group has been left
};

/// Made by make_request() and ended by end_request(), which keeps the memory for later requests.
struct lockstep_request {
  std::shared_ptr<lockstep::c::GroupState> state;
  lockstep::shm::WorkPtr work;
  uint64_t number = 0;    ///< on the rank's page
  int* source = nullptr;  ///< of a receive
};

namespace lockstep::c {

/// Throws if this request has been waited for, or is none.
void check_request(const char* function, const lockstep_request* request);
lockstep_request* make_request(lockstep_request content);
/// Returns what the request held. It stays known as one that has been waited for, for the next thousands of requests.
lockstep_request end_request(lockstep_request* request);

}  // namespace lockstep::c
