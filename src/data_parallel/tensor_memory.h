#pragma once

namespace lockstep {

/// While one exists, freed memory of CPU tensors of 1 MiB and more is kept for later tensors (BlockCache), and malloc
/// keeps the rest (keep_freed_memory). While one of them is tight, that is memory of tensors of 128 KiB and more, and
/// little more is kept than was in use at once: activations of different sizes leave holes in a heap, and in backward
/// their memory serves gradients. Destroying the last one returns all kept memory to the kernel. This affects the
/// whole process. It has no effect if the user has set malloc's environment variables, if malloc is not glibc's, or,
/// for tensors, if LibTorch's CPU allocator has been replaced. Any thread may use it.
class TensorMemory {
 public:
  /// If `keep` is false, this object does nothing.
  explicit TensorMemory(bool keep, bool tight = false);
  ~TensorMemory();
  TensorMemory(const TensorMemory&) = delete;
  TensorMemory& operator=(const TensorMemory&) = delete;

  /// Ends the owner's step. Memory unused for three steps is returned to the kernel. With several owners, the slowest
  /// one's steps count: a generator that steps once for every five steps of its critic must find its memory again.
  void end_step();

  /// Returns all kept memory, and the free memory of malloc's heap, holes included, to the kernel. Use it after freeing
  /// memory that no step will need again, such as a model's moved parameters. Does nothing without an object.
  static void release();

 private:
  const bool keeps_, tight_;
};

}  // namespace lockstep
