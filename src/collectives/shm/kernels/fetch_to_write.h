#pragma once

#include <cstddef>

namespace lockstep::shm {

/// Starts to fetch these cache lines for writing. A store to a line that another processor has read waits for it, and
/// few such stores are in flight at once.
inline void fetch_to_write(const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
#ifdef __x86_64__
    // What the compiler makes of its builtin here fetches the line for reading. Processors without this instruction do
    // nothing.
    asm volatile("prefetchw %0" : : "m"(static_cast<const char*>(from)[at]));
#else
    __builtin_prefetch(static_cast<const char*>(from) + at, 1);
#endif
  }
}

}  // namespace lockstep::shm
