#pragma once

namespace lockstep {

/// Makes glibc's malloc keep freed memory: blocks below 32 MiB come from the heap, and the free end of the heap is
/// returned to the kernel only beyond 2 GiB. By default malloc returns most of it at the end of a backward, and the
/// next forward takes it again with one fault per page, while all ranks wait for the slowest. (A step of a ResNet had
/// 5,000 to 18,000 faults, a tenth of its time.) Blocks of very different sizes leave holes in the heap, so large
/// tensors should come from elsewhere: data_parallel/tensor_memory.h. Returns false and changes nothing if the user has
/// set MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_ or GLIBC_TUNABLES, or if malloc is not glibc's but a linked or
/// preloaded library's (jemalloc, tcmalloc).
bool keep_freed_memory();

/// Returns free memory to the kernel now, and from now on whenever the free end of the heap exceeds 64 MiB, as glibc
/// does by itself once it has seen blocks of 32 MiB.
/// REQUIRES: keep_freed_memory() has returned true.
void release_freed_memory();

}  // namespace lockstep
