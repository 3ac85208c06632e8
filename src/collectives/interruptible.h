#pragma once

#include <string>

namespace lockstep {

/// What an engine may offer besides c10d's interface: it can end from any thread what its rank waits for.
class Interruptible {
 public:
  virtual ~Interruptible() = default;
  /// Ends the group: what this rank waits for in it now or later fails with `why`. In shared memory it ends for all
  /// ranks.
  virtual void interrupt(const std::string& why) = 0;
};

}  // namespace lockstep
