#pragma once

#include <memory>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "collectives/hierarchical/progress.h"

namespace lockstep::hierarchical_engine {

/// Carries messages between all ranks of a group, on any machines.
class Carrier {
 public:
  virtual ~Carrier() = default;
  /// Starts a message; `bytes` are contiguous. Messages between two ranks with one tag arrive in the order in which
  /// they were sent. A Work's wait takes a timeout, and ends when abort() is called.
  virtual c10::intrusive_ptr<c10d::Work> send(const at::Tensor& bytes, int to, int tag) = 0;
  virtual c10::intrusive_ptr<c10d::Work> receive(const at::Tensor& bytes, int from, int tag) = 0;
  /// The tag for one part of a program's message (typed_message.h), if each part needs its own.
  virtual int part_tag(int tag, int /*part*/) const { return tag; }
  /// Called when this rank's operation has failed, so that the others do not wait for it. `some_peer` is any other
  /// rank.
  virtual void break_off(int some_peer) = 0;
  /// Called when this rank leaves, after its part in all operations.
  virtual void leave() {}
  /// Null if messages progress by themselves.
  virtual Progress* progress() { return nullptr; }
};

}  // namespace lockstep::hierarchical_engine
