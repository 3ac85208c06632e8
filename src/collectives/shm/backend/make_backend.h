#pragma once

#include <chrono>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::shm_engine {

/// Collectives and messages for CPU tensors through memory that the ranks of one machine share. Every rank of the group
/// must call it. Blocks until the group is formed. Throws Error on every rank if the ranks are not on one machine,
/// naming the hosts, or if ranks do not join in time, naming them.
///
/// `name` is the backend's name. `writes_page`: the backend shows its operations on this rank's page, because no higher
/// layer, such as Group, does. `timeout` limits an operation, and forming the group unless `join_timeout` is given. Any
/// thread may use the backend.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               std::chrono::milliseconds timeout, const std::string& name = "shm",
                                               bool writes_page = false,
                                               std::optional<std::chrono::milliseconds> join_timeout = std::nullopt);

/// A backend whose ranks form their group later, by c10d::Backend::reconfigure(); until then every operation throws.
/// Nobody waits for the others here. `rank` and `world_size` are what it tells until then. It shows its operations on
/// this rank's page.
c10::intrusive_ptr<c10d::Backend> make_unformed_backend(int rank, int world_size, std::chrono::milliseconds timeout,
                                                        const std::string& name);

/// Another backend of the ranks of `backend`, in the same group of the core: calls of both are compared across ranks as
/// one sequence of operations. It does not write the page. Null if `backend` is another engine. `timeout`: null for
/// that of `backend`.
c10::intrusive_ptr<c10d::Backend> share_group_of(c10d::Backend& backend,
                                                 std::optional<std::chrono::milliseconds> timeout);

/// Ends the threads that complete futures, before the interpreter shuts down: no callback runs or is freed afterwards.
/// Waits for running callbacks, at most this long. Incomplete futures fail; futures of later operations are completed
/// before they are returned.
void end_futures(std::chrono::milliseconds at_most);

}  // namespace lockstep::shm_engine
