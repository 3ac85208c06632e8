#pragma once

namespace lockstep {

/// From now on the memory of CPU tensors of 1 MiB and more is kept for the next ones when they are freed (BlockCache),
/// and malloc keeps the rest (keep_freed_memory). Changes nothing where the user has set malloc's variables, where
/// malloc is not glibc's, or, for tensors, where LibTorch's CPU allocator is not its own any more.
void keep_tensor_memory();

/// A step is over; see BlockCache.
void end_step_of_tensor_memory();

}  // namespace lockstep
