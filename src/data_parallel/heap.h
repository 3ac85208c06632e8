#pragma once

namespace lockstep {

/// Lets glibc's malloc keep what is freed: blocks below 32 MiB come from the heap, and the heap's free end goes back to
/// the kernel only beyond 2 GiB. By itself it gives most of that back at the end of a backward, and the next forward
/// takes it again page by page, each a fault; and all ranks wait for the one that has most of them. (A ResNet's step
/// had 5,000 to 18,000 faults, a tenth of its time.) Blocks of very different sizes leave holes there, so large tensors
/// should come from elsewhere: data_parallel/tensor_memory.h. Returns false, and nothing has changed, if the user has
/// chosen differently (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES) or malloc is not glibc's, but
/// that of a library which was linked or preloaded (jemalloc, tcmalloc).
bool keep_freed_memory();

/// After keep_freed_memory() has returned true: what is free goes back to the kernel now, and from now on as glibc by
/// itself would do it after it has seen blocks of 32 MiB: the heap's free end beyond 64 MiB.
void release_freed_memory();

}  // namespace lockstep
