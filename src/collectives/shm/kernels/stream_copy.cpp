#include "collectives/shm/kernels/stream_copy.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>

#include "collectives/shm/segment/layout.h"

#ifdef __SSE2__
#include <emmintrin.h>
#endif

namespace lockstep::shm {

namespace {

template <bool kFetchAhead>
void copy_past_caches(std::byte* to, const std::byte* from, size_t bytes) {
#ifdef __SSE2__
  constexpr size_t kAhead = 4 * kCacheLine;  // 10 % faster than without, on small pages and on huge ones
  const size_t head = std::min(bytes, -reinterpret_cast<uintptr_t>(to) % kCacheLine);
  std::memcpy(to, from, head);
  to += head, from += head, bytes -= head;
  for (; bytes >= kCacheLine; to += kCacheLine, from += kCacheLine, bytes -= kCacheLine) {
    if (kFetchAhead && bytes > kAhead) _mm_prefetch(reinterpret_cast<const char*>(from + kAhead), _MM_HINT_NTA);
    for (size_t i = 0; i < kCacheLine; i += sizeof(__m128i))
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + i), _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i)));
  }
  _mm_sfence();  // such stores are not ordered by a later release
#endif
  std::memcpy(to, from, bytes);
}

/// Bytes, of one of the processor's. sysconf() has the sum of all of them, of which a core reaches one.
size_t last_level_cache() {
  constexpr size_t kUsual = size_t{32} << 20;
  size_t largest = 0;
  for (int index = 0; index < 8; ++index) {
    std::ifstream file("/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size");
    size_t kib = 0;
    char unit = 0;
    if (file >> kib >> unit && unit == 'K') largest = std::max(largest, kib << 10);
  }
  return largest >= (size_t{1} << 20) ? largest : kUsual;
}

}  // namespace

bool leave_caches(size_t bytes) {
  static const size_t most = last_level_cache();
  return bytes >= most;
}

void plain_copy(std::byte* to, const std::byte* from, size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

CopyFunction result_copy(size_t touched_bytes) { return leave_caches(touched_bytes) ? stream_copy : plain_copy; }

void stream_copy(std::byte* to, const std::byte* from, size_t bytes) { copy_past_caches<false>(to, from, bytes); }

void stream_copy_from_memory(std::byte* to, const std::byte* from, size_t bytes) {
  copy_past_caches<true>(to, from, bytes);
}

}  // namespace lockstep::shm
