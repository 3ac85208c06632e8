#pragma once

#include <cstddef>
#include <cstring>

// Writing to cache lines that another processor has read. A store to one waits until that processor has given it up,
// and few such stores are in flight at once.
namespace lockstep::shm {

/// Starts to fetch these lines for writing.
inline void fetch_to_write(const void* from, size_t bytes) {
  constexpr size_t kLine = 64;
  for (size_t at = 0; at < bytes; at += kLine) {
#ifdef __x86_64__
    // The compiler's builtin would fetch the line for reading here. Processors without this instruction ignore it.
    asm volatile("prefetchw %0" : : "m"(static_cast<const char*>(from)[at]));
#else
    __builtin_prefetch(static_cast<const char*>(from) + at, 1);
#endif
  }
}

/// std::memcpy that does not fetch the lines it overwrites whole, if the processor can do that.
inline void copy_without_fetching(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __x86_64__
  asm volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes) : : "memory");
#else
  std::memcpy(to, from, bytes);
#endif
}

}  // namespace lockstep::shm
