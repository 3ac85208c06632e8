#pragma once

#include <lockstep/cxx20.h>

#include <memory>

namespace lockstep {

class TensorMemory;

/// While one exists, the process keeps the memory of freed CPU tensors for later ones instead of giving it back to the
/// kernel, which saves a page fault for every 4 KiB of a step's tensors. DistributedDataParallel and
/// FullyShardedDataParallel do so by themselves; this is for programs without one: a single process, a Pipeline,
/// inference. Memory in use and memory kept add up to at most 1.5 times the peak use. Several may exist; when the last
/// one is destroyed, all kept memory goes back. Changes nothing if malloc's environment variables are set, if malloc is
/// not glibc's, or if the program has set a CPU allocator. Any thread may use it. Not a collective.
class KeptMemory {
 public:
  KeptMemory();
  ~KeptMemory();
  KeptMemory(KeptMemory&&) noexcept;
  KeptMemory& operator=(KeptMemory&&) noexcept;

  /// The end of a step, if the program has steps: memory that three of them did not need goes back to the kernel. With
  /// several owners, models among them, these are steps of the slowest.
  void end_step();

 private:
  std::unique_ptr<TensorMemory> memory_;  ///< null after a move
};

}  // namespace lockstep
