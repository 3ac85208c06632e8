#include <immintrin.h>

#include "collectives/shm/reduce_sets.h"

namespace lockstep::shm {
namespace {

constexpr int kWidth = 32;

struct HalfConversion {
  static inline __attribute__((always_inline)) __m256 load(const void* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static inline __attribute__((always_inline)) void store(void* to, __m256 values) {
    _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
  }
};

#include "collectives/shm/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_avx2(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
