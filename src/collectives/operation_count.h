#pragma once

#include <atomic>
#include <cstdint>

#include "base/thread_token.h"

namespace lockstep {

/// The number of collectives and messages that this process has begun, over all groups. Most processes begin all of
/// them on one thread, which counts without a locked instruction.
class OperationCount {
 public:
  void add() {
    const uint64_t here = thread_number();
    uint64_t owner = owner_.load(std::memory_order_relaxed);
    if (owner == here || (owner == 0 && owner_.compare_exchange_strong(owner, here)))
      own_.store(own_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
    else
      others_.fetch_add(1, std::memory_order_relaxed);
  }
  /// Any thread may call.
  uint64_t load() const { return own_.load(std::memory_order_relaxed) + others_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> owner_{0};  ///< the number of the first thread that called add(); 0: none has
  std::atomic<uint64_t> own_{0};    ///< begun by that thread
  std::atomic<uint64_t> others_{0};
};
inline OperationCount operations_started;

}  // namespace lockstep
