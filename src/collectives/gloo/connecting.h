#pragma once

#include <chrono>
#include <functional>
#include <memory>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "collectives/data_port.h"

namespace lockstep::gloo_engine {

/// The ranks of a group whose engines connect to each other.
struct Connecting {
  c10::intrusive_ptr<c10d::Store> store;
  int rank = 0, world_size = 0;
  std::chrono::milliseconds timeout;
  std::shared_ptr<const DataPort> port;
};

/// Makes an engine by `connect`, which runs in a thread of its own, and returns when the engines of all ranks are
/// connected. Throws Error on all ranks, naming the pairs that cannot connect, once a pair has had no connection for
/// 30 s, or for half the timeout; and on all ranks if `connect` throws on one. After an Error `connect` may still be
/// running, since Gloo's connecting cannot be ended, so it must own what it uses.
/// REQUIRES: every rank calls it.
c10::intrusive_ptr<c10d::Backend> connect_all(const Connecting& ranks,
                                              std::function<c10::intrusive_ptr<c10d::Backend>()> connect);

}  // namespace lockstep::gloo_engine
