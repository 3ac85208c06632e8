#pragma once

#include <lockstep/cxx20.h>

#include <memory>

namespace lockstep {

class TensorMemory;

/// While one exists, the process keeps the memory of freed CPU tensors for later tensors instead of returning it to the
/// kernel, which saves a page fault for every 4 KiB of a step's tensors. DistributedDataParallel and
/// FullyShardedDataParallel do so by themselves; use this in programs without one: a single process, a Pipeline,
/// inference. Memory in use and kept memory add up to at most 1.5 times the peak use. Several may exist; destroying the
/// last one returns all kept memory. Has no effect if malloc's environment variables are set, if malloc is not glibc's,
/// or if the program has set a CPU allocator. Any thread may use it. Not a collective.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(KeptMemory&&) noexcept;
  KeptMemory& operator=(KeptMemory&&) noexcept;

  /// Call it at the end of a step, if the program has steps: memory that three steps did not need is returned to the
  /// kernel. If there are several owners, models included, the slowest one's steps count.
  void end_step();

 private:
  std::unique_ptr<TensorMemory> memory_;  ///< null after a move
};

}  // namespace lockstep
