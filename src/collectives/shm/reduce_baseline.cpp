#include "collectives/shm/reduce_sets.h"

namespace lockstep::shm {
namespace {

constexpr int kWidth = 16;

/// float16 by hand, for processors without F16C; the same bits as the instruction, NaNs included.
struct HalfConversion {
  typedef float Values __attribute__((vector_size(16)));

  static float widen(uint16_t half) {
    const uint32_t sign = static_cast<uint32_t>(half & 0x8000) << 16;
    const uint32_t exponent = (half >> 10) & 31, mantissa = half & 1023;
    uint32_t bits;
    if (exponent == 31) {
      bits = sign | 0x7f800000u | mantissa << 13 | (mantissa != 0 ? 0x400000u : 0u);
    } else if (exponent != 0) {
      bits = sign | (exponent + 112) << 23 | mantissa << 13;
    } else {
      const float small = static_cast<float>(mantissa) * 0x1p-24f;  // exact
      __builtin_memcpy(&bits, &small, 4);
      bits |= sign;
    }
    float result;
    __builtin_memcpy(&result, &bits, 4);
    return result;
  }

  static uint16_t narrow(float value) {
    uint32_t bits;
    __builtin_memcpy(&bits, &value, 4);
    const auto sign = static_cast<uint16_t>(bits >> 16 & 0x8000);
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00 | (bits >> 13 & 0x3ff));
    if (bits >= 0x477ff000u) return sign | 0x7c00;  // 65520 and more round to infinity
    if (bits < 0x38800000u) {                       // below 2^-14: adding 0.5 lets the processor round to 2^-24
      float magnitude;
      __builtin_memcpy(&magnitude, &bits, 4);
      magnitude += 0.5f;
      __builtin_memcpy(&bits, &magnitude, 4);
      return static_cast<uint16_t>(sign | (bits - 0x3f000000u));
    }
    return static_cast<uint16_t>(sign | ((bits - 0x38000000u + 0xfffu + (bits >> 13 & 1)) >> 13));
  }

  static Values load(const void* from) {
    uint16_t halves[4];
    __builtin_memcpy(halves, from, sizeof halves);
    return Values{widen(halves[0]), widen(halves[1]), widen(halves[2]), widen(halves[3])};
  }

  static void store(void* to, Values values) {
    const uint16_t halves[4] = {narrow(values[0]), narrow(values[1]), narrow(values[2]), narrow(values[3])};
    __builtin_memcpy(to, halves, sizeof halves);
  }
};

#include "collectives/shm/reduce_kernels.inc"

}  // namespace

ReduceFunction find_reduce_baseline(DataType type, ReduceOp op, int input_count) { return find(type, op, input_count); }

}  // namespace lockstep::shm
