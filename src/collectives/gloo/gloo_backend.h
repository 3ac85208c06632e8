#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::gloo_engine {

/// LibTorch's Gloo over TCP, plus what it lacks: reductions in the order of shared memory, in every dtype, and errors
/// that name the ranks whose calls differ. Connects all ranks of the group; throws Error on all of them if two cannot
/// connect (connect_all()). `address` is the local address to bind to, never a wildcard. `timeout` limits an operation,
/// and connecting unless `join_timeout` is given.
/// REQUIRES: every rank calls it.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout,
                                               std::optional<std::chrono::milliseconds> join_timeout = std::nullopt);

/// LibTorch's Gloo alone, as every user of c10d gets it, for comparison.
c10::intrusive_ptr<c10d::Backend> make_plain_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const std::string& address,
                                                     std::chrono::milliseconds timeout,
                                                     std::optional<std::chrono::milliseconds> join_timeout = {});

/// The bytes that this rank's reductions and all_gathers have sent over a backend of make_backend() so far.
int64_t bytes_sent(const c10d::Backend& backend);

}  // namespace lockstep::gloo_engine
