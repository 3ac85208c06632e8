#include "collectives/shm/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "collectives/shm/layout.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lockstep::shm {

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kCacheLine);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kCacheLine; to += kCacheLine, from += kCacheLine, bytes -= kCacheLine)
    for (size_t i = 0; i < kCacheLine; i += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  _mm_sfence();  // such stores are not ordered by a later release
#endif
  std::memcpy(to, from, bytes);
}

}  // namespace lockstep::shm
