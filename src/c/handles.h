#pragma once

#include <lockstep/c.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <utility>

#include "base/shared_segment.h"
#include "c/memory.h"
#include "collectives/call_guard.h"
#include "collectives/shm/protocol/communicator.h"

namespace lockstep::c {

/// State shared by a group's handle and its requests.
struct GroupState {
  GroupState(shm::World world, std::chrono::milliseconds timeout_, bool is_world_)
      : group(std::move(world)), timeout(timeout_), is_world(is_world_) {}

  shm::Communicator group;
  const std::chrono::milliseconds timeout;
  const bool is_world;
  const unsigned generation = fork_generation();  ///< of the process that has the group's memory
  CurrentCaller caller;
  HandedOut handed_out;
};

}  // namespace lockstep::c

/// The memory of a handle is never freed, so that a call after lockstep_leave() is an error and not undefined
/// behaviour.
struct lockstep_group {
  std::shared_ptr<lockstep::c::GroupState> state;  ///< null once the group has been left
};

namespace lockstep::c {

/// The object behind a request handle. The handle is a number cast to a pointer. Numbers are never reused, so a copy of
/// a handle that has been waited for is refused, however many requests followed.
struct PendingRequest {
  std::shared_ptr<GroupState> state;
  shm::WorkPtr work;
  uint64_t number = 0;    ///< on the rank's page
  int* source = nullptr;  ///< of a receive
};

lockstep_request* make_request(PendingRequest content);
/// Both throw if this request has been waited for, or is not a request.
PendingRequest find_request(const char* function, const lockstep_request* request);
PendingRequest end_request(const char* function, const lockstep_request* request);

}  // namespace lockstep::c
