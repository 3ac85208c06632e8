#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace lockstep::gloo_engine {

/// LibTorch's Gloo over TCP, with what it lacks put in front: mean, bool, int16 and complex reductions.
/// Connects all ranks of the group; every rank must call. `address` is the local address to bind, never a wildcard.
c10::intrusive_ptr<c10d::Backend> make_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                                               const std::string& address, std::chrono::milliseconds timeout);

/// LibTorch's Gloo alone, to compare with: nothing is looked into, and every c10d caller finds what it knows.
c10::intrusive_ptr<c10d::Backend> make_plain_backend(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                                     int world_size, const std::string& address,
                                                     std::chrono::milliseconds timeout);

}  // namespace lockstep::gloo_engine
