#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::gloo_engine {

/// LibTorch's Gloo over TCP, plus what it lacks: mean, bool, int16 and complex reductions, and errors that name the
/// ranks that called something else. Connects all ranks of the group; every rank must call. `address` is the local
/// address to bind to, never a wildcard.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout);

/// LibTorch's Gloo alone, to compare with: as every user of c10d gets it.
c10::intrusive_ptr<c10d::Backend> make_plain_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const std::string& address,
                                                     std::chrono::milliseconds timeout);

}  // namespace lockstep::gloo_engine
