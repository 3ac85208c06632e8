#include <immintrin.h>

#include "collectives/shm/reduce_sets.h"

namespace lockstep::shm {
namespace {

constexpr int kWidth = 64;

// The masked forms, because the plain ones of g++ 12 warn about their own headers.
struct HalfConversion {
  static inline __attribute__((always_inline)) __m512 load(const void* from) {
    return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(static_cast<const __m256i*>(from)));
  }
  static inline __attribute__((always_inline)) void store(void* to, __m512 values) {
    _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_maskz_cvtps_ph(0xffff, values, _MM_FROUND_TO_NEAREST_INT));
  }
};

#include "collectives/shm/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_avx512(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
