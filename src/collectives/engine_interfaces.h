#pragma once

#include <string>

#include "collectives/shm/protocol/request.h"

namespace lockstep {

/// What an engine may offer besides c10d's interface: an operation that is over when the call returns. It allocates no
/// Work and no tensor, which together cost more than a small operation itself (measured on 2 ranks in shared memory,
/// 4 bytes: 3.7 us through c10d).
class BlockingEngine {
 public:
  virtual ~BlockingEngine() = default;
  /// Runs an operation on contiguous CPU memory, in its place among the group's other operations. Throws what a Work's
  /// wait would throw. Data that is only moved comes as bytes, as it does through c10d: ranks may mix the two ways.
  virtual void run(shm::Request&& request) = 0;
};

/// The same: it can end from any thread what its rank waits for.
class Interruptible {
 public:
  virtual ~Interruptible() = default;
  /// Ends the group: what this rank waits for in it now or later fails with `why`. In shared memory it ends for all
  /// ranks.
  virtual void interrupt(const std::string& why) = 0;
};

}  // namespace lockstep
