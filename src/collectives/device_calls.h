#pragma once

#include <cstdint>
#include <deque>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "base/mutex.h"
#include "collectives/shm/protocol/request.h"

namespace lockstep {

/// Compares the ranks' operations on tensors on a device, since a device's engine compares nothing: NCCL moves what it
/// has where ranks call it with other sizes, and waits forever where they call other operations.
///
/// An operation's call is gathered from all ranks by the group's engine for the CPU, beside the operation itself. So a
/// rank that has ended, left, or passed a tensor on the CPU is found by that engine, too. Any thread may call.
class DeviceCalls {
 public:
  /// Sends this rank's call to the other ranks. `sequence` is its number in messages. Returns the announcement's
  /// number. Throws if an earlier call did not match.
  /// REQUIRES: every rank announces its calls in the order of its operations on `cpu`.
  uint64_t announce(c10d::Backend& cpu, const shm::Call& call, uint64_t sequence);
  /// Waits until every rank has announced as many calls, and compares them. Throws if one does not match, on every
  /// rank, or if the engine fails.
  void check(uint64_t number);
  /// Whether check() returns, or throws, without waiting.
  bool has_arrived(uint64_t number);
  /// Compares what has arrived. Returns what is wrong; empty: nothing is known to be.
  std::string problem();

 private:
  struct Announced {
    uint64_t number, sequence;
    at::Tensor calls;  ///< a row for each rank
    c10::intrusive_ptr<c10d::Work> gathered;
  };
  void compare_front() LOCKSTEP_REQUIRES(mutex_);
  void compare_arrived() LOCKSTEP_REQUIRES(mutex_);
  void throw_problem() const LOCKSTEP_REQUIRES(mutex_);

  Mutex mutex_;
  uint64_t announced_ LOCKSTEP_GUARDED_BY(mutex_) = 0;
  std::deque<Announced> pending_ LOCKSTEP_GUARDED_BY(mutex_);
  std::string problem_ LOCKSTEP_GUARDED_BY(mutex_);
};

}  // namespace lockstep
