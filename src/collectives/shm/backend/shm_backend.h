#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::shm_engine {

/// Collectives and messages through memory shared by the ranks of one machine; CPU tensors. Every rank of the group
/// must call; blocks until the group stands. Throws Error on every rank, naming hosts, where the ranks are not on one
/// machine, or naming ranks that did not come in time.
///
/// `name` is what the backend calls itself. `keeps_page`: nothing above it, such as Group, tells this rank's page of
/// the operations. `join_timeout`: how long to wait for the others here; else `timeout`, which an operation may take.
/// Any thread may use it.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               std::chrono::milliseconds timeout, const std::string& name = "shm",
                                               bool keeps_page = false,
                                               std::optional<std::chrono::milliseconds> join_timeout = std::nullopt);

/// Ends the threads that complete futures, for an interpreter that is about to go: no callback runs or is freed after.
/// Those that run are waited for, at most this long. Futures that are not complete fail; of later operations they are
/// completed before they are returned.
void end_futures(std::chrono::milliseconds at_most);

}  // namespace lockstep::shm_engine
