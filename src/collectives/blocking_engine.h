#pragma once

#include <cstdint>

#include <c10/core/ScalarType.h>

#include <lockstep/group.h>

namespace lockstep {

/// What an engine may offer besides c10d's interface: an operation that is over when the call returns. It makes no
/// Work and no tensor on its way, which together cost more than a small operation itself (measured on 2 ranks, shared
/// memory, 4 bytes: 3.7 us by way of c10d).
class BlockingEngine {
 public:
  enum class Kind : uint8_t { kAllReduce, kBroadcast, kAllGather, kReduceScatter, kBarrier };

  /// One operation on contiguous CPU memory, in its place among the group's other operations. `count` is the number
  /// of elements of a rank's part: all of an all_reduce or a broadcast, the input of an all_gather, the output of a
  /// reduce_scatter. What is only moved comes as bytes, as it does by way of c10d: ranks may mix the two ways.
  struct Call {
    Kind kind = Kind::kBarrier;
    c10::ScalarType dtype = c10::ScalarType::Byte;
    ReduceOp op = ReduceOp::kSum;
    int root = 0;
    int64_t count = 0;
    const void* input = nullptr;
    void* output = nullptr;
  };

  virtual ~BlockingEngine() = default;
  /// Throws what a Work's wait would throw.
  virtual void run(const Call& call) = 0;
};

}  // namespace lockstep
