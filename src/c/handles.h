#pragma once

#include <lockstep/c.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/shared_segment.h"
#include "c/memory.h"
#include "collectives/call_guard.h"
#include "collectives/shm/protocol/communicator.h"
#include "collectives/shm/protocol/groups_search.h"

namespace lockstep::c {

/// State shared by a group's handle and its requests.
struct GroupState {
  GroupState(shm::World world, std::chrono::milliseconds timeout_, bool is_world_)
      : group(std::move(world)), timeout(timeout_), is_world(is_world_) {}
  ~GroupState() {
    if (search && generation == fork_generation()) search->remove(group);
  }
  GroupState(const GroupState&) = delete;

  /// `search_` finds ranks that wait for each other in this group and others.
  void search_with(std::shared_ptr<shm::GroupsSearch> search_, shm::SearchedGroup names_) {
    names = std::move(names_);
    search = std::move(search_);
    search->add(group, names);
    group.with_waiter([this](shm::Waiter& waiter) { waiter.search_groups(search); });
  }

  shm::Communicator group;
  const std::chrono::milliseconds timeout;
  const bool is_world;
  const unsigned generation = fork_generation();  ///< of the process that has the group's memory
  CurrentCaller caller;
  HandedOut handed_out;
  shm::SearchedGroup names;
  std::shared_ptr<shm::GroupsSearch> search;  ///< of all groups of one world; null in a world of one
  int splits = 0;                             ///< lockstep_split() of this group so far, the same on all ranks
};

}  // namespace lockstep::c

/// The memory of a handle is never freed, so that a call after lockstep_leave() is an error and not undefined
/// behaviour.
struct lockstep_group {
  std::shared_ptr<lockstep::c::GroupState> state;  ///< null once the group has been left
};

namespace lockstep::c {

/// What a request does with the caller's memory until it is done.
struct Use {
  const char* function = "";  ///< that started it
  lockstep_dtype dtype = LOCKSTEP_UINT8;
  int64_t count = 0;
  MemoryRange read{}, written{};

  /// "lockstep_all_reduce of 1000 elements of float32".
  std::string text() const;
};

/// The object behind a request handle. The handle is a number cast to a pointer. Numbers are never reused, so a copy of
/// a handle that has been waited for is refused, however many requests followed.
struct PendingRequest {
  std::shared_ptr<GroupState> state;
  shm::WorkPtr work;
  uint64_t number = 0;    ///< on the rank's page
  int* source = nullptr;  ///< of a receive
  Use use{};
  bool is_waited_for = false;
  std::optional<Clock::time_point> tested_since{};    ///< the first lockstep_test()
  std::vector<std::shared_ptr<GroupState>> memory{};  ///< groups that this rank has left, and whose memory it uses
};

lockstep_request* make_request(PendingRequest content);
/// Both throw if this request has been waited for, or is not a request. The first call of test_request() begins the
/// time for which it is tested, that of wait_for_request() the one wait: end_request() follows it.
PendingRequest test_request(const char* function, const lockstep_request* request);
PendingRequest wait_for_request(const char* function, const lockstep_request* request);
void end_request(const lockstep_request* request) noexcept;

/// What a request that is not done, of any group of this process, does with this memory; none: no request uses it.
std::optional<Use> pending_use(MemoryRange memory);
/// Requests that are not done and use memory of `left` keep it.
void keep_memory(const std::shared_ptr<GroupState>& left);

/// What each rank states, by rank: a collective that bears the name `called_as`. Every rank calls it.
template <typename Statement>
std::vector<Statement> all_gather(const std::shared_ptr<GroupState>& state, shm::CalledAs called_as,
                                  const Statement& mine) {
  static_assert(std::is_trivially_copyable_v<Statement>);
  std::vector<Statement> all(static_cast<size_t>(state->group.size()));
  state->group.run({.kind = shm::OperationKind::kAllGather,
                    .type = shm::DataType::kUInt8,
                    .called_as = called_as,
                    .count = sizeof mine,
                    .input = &mine,
                    .output = all.data()},
                   state->timeout);
  return all;
}

}  // namespace lockstep::c
