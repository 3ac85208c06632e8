#pragma once

#include <cstdint>

namespace lockstep {

/// While one is there, the memory of CPU tensors of 1 MiB and more is kept for the next ones when they are freed
/// (BlockCache), and malloc keeps the rest (keep_freed_memory). With the last one everything kept goes back to the
/// kernel. This concerns the whole process. It changes nothing where the user has set malloc's variables, where malloc
/// is not glibc's, or, for tensors, where LibTorch's CPU allocator is not its own any more. Any thread may use it.
class TensorMemory {
 public:
  /// `keep`: false: this one has no say.
  explicit TensorMemory(bool keep);
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  /// The owner's step is over. What nobody has taken for three steps goes back to the kernel, of several owners three
  /// of the one with the fewest: a generator that steps after every fifth of its critic's must find its memory again.
  void end_step();

 private:
  const bool keeps_;
  // Guarded by the mutex of all:
  bool stepped_ = false;  ///< since all have
  uint64_t last_ = 0;     ///< of all owners' steps the last that was this one's
};

}  // namespace lockstep
