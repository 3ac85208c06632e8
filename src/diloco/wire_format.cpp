#include "diloco/wire_format.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

// All machines decode the same bytes to the same bits: every operation here is one of IEEE 754, in a fixed order.

namespace lockstep::diloco {
namespace {

constexpr float kLargest = std::numeric_limits<float>::max();
constexpr uint32_t kLargestBFloat16 = 0x7f7f0000;

uint16_t to_bfloat16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = bits & 0x80000000, magnitude = bits & 0x7fffffff;
  const uint32_t rounded = magnitude + 0x7fff + ((magnitude >> 16) & 1);
  return static_cast<uint16_t>((sign | std::min(rounded, kLargestBFloat16)) >> 16);
}

float from_bfloat16(uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }

/// The smallest bfloat16 that is at least `value`, which is not negative and far from the largest.
uint16_t rounded_up(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

/// To the nearest whole number, to even in the middle, for magnitudes below 2^22.
float rounded(float value) {
  constexpr float kShift = 12582912;  // 1.5 * 2^23: its last bit counts ones
  return (value + kShift) - kShift;
}

uint16_t scale_of(const float* values, int64_t elements, float steps) {
  float largest = 0;
  for (int64_t i = 0; i < elements; ++i) largest = std::max(largest, std::fabs(values[i]));
  return rounded_up(largest / steps);
}

int quantised(float value, float scale, float steps) {
  return static_cast<int>(std::min(std::max(rounded(value / scale), -steps), steps));
}

/// A scale that was rounded up may take the block's largest number beyond the largest of all.
float restored(int value, float scale) {
  return std::min(std::max(static_cast<float>(value) * scale, -kLargest), kLargest);
}

int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }

void put_int8(const float* values, int64_t elements, float scale, uint8_t* to) {
  for (int64_t i = 0; i < elements; ++i) to[i] = static_cast<uint8_t>(quantised(values[i], scale, 127));
}

void put_int4(const float* values, int64_t elements, float scale, uint8_t* to) {
  for (int64_t i = 0; i < elements; i += 2) {
    const int low = quantised(values[i], scale, 7) & 15;
    const int high = i + 1 < elements ? quantised(values[i + 1], scale, 7) & 15 : 0;
    to[i / 2] = static_cast<uint8_t>(low | high << 4);
  }
}

void get_int8(const uint8_t* from, int64_t elements, float scale, float* to) {
  for (int64_t i = 0; i < elements; ++i) to[i] = restored(static_cast<int8_t>(from[i]), scale);
}

void get_int4(const uint8_t* from, int64_t elements, float scale, float* to) {
  for (int64_t i = 0; i < elements; ++i) {
    const int bits = i % 2 == 0 ? from[i / 2] & 15 : from[i / 2] >> 4;
    to[i] = restored((bits ^ 8) - 8, scale);
  }
}

/// Calls body(first, elements, place of the scale, place of the numbers) for each block.
template <typename Body>
void for_each_block(Wire wire, int64_t elements, const Body& body) {
  const int64_t numbers = 2 * blocks_of(elements);
  const int64_t bytes = wire == Wire::kInt8 ? kBlock : kBlock / 2;
  for (int64_t block = 0; block * kBlock < elements; ++block)
    body(block * kBlock, std::min(kBlock, elements - block * kBlock), 2 * block, numbers + block * bytes);
}

}  // namespace

const char* name_of(Wire wire) {
  constexpr const char* kNames[] = {"fp32", "bf16", "int8", "int4"};
  return kNames[static_cast<int>(wire)];
}

int64_t encoded_bytes(Wire wire, int64_t elements) {
  switch (wire) {
    case Wire::kFloat32:
      return 4 * elements;
    case Wire::kBFloat16:
      return 2 * elements;
    case Wire::kInt8:
      return 2 * blocks_of(elements) + elements;
    case Wire::kInt4:
      return 2 * blocks_of(elements) + (elements + 1) / 2;
  }
  return 0;
}

void encode(Wire wire, const float* values, int64_t elements, uint8_t* to) {
  if (wire == Wire::kFloat32) {
    if (elements > 0) std::memcpy(to, values, static_cast<size_t>(4 * elements));
  } else if (wire == Wire::kBFloat16) {
    for (int64_t i = 0; i < elements; ++i) {
      const uint16_t bits = to_bfloat16(values[i]);
      std::memcpy(to + 2 * i, &bits, 2);
    }
  } else {
    const bool is_int8 = wire == Wire::kInt8;
    for_each_block(wire, elements, [&](int64_t first, int64_t count, int64_t scale_at, int64_t numbers_at) {
      const uint16_t scale = scale_of(values + first, count, is_int8 ? 127 : 7);
      std::memcpy(to + scale_at, &scale, 2);
      // A block of zeros has a scale of 0, by which nothing can be divided.
      const float divisor = scale == 0 ? 1 : from_bfloat16(scale);
      (is_int8 ? put_int8 : put_int4)(values + first, count, divisor, to + numbers_at);
    });
  }
}

void decode(Wire wire, const uint8_t* from, int64_t elements, float* to) {
  if (wire == Wire::kFloat32) {
    if (elements > 0) std::memcpy(to, from, static_cast<size_t>(4 * elements));
  } else if (wire == Wire::kBFloat16) {
    for (int64_t i = 0; i < elements; ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, from + 2 * i, 2);
      to[i] = from_bfloat16(bits);
    }
  } else {
    const bool is_int8 = wire == Wire::kInt8;
    for_each_block(wire, elements, [&](int64_t first, int64_t count, int64_t scale_at, int64_t numbers_at) {
      uint16_t scale = 0;
      std::memcpy(&scale, from + scale_at, 2);
      (is_int8 ? get_int8 : get_int4)(from + numbers_at, count, from_bfloat16(scale), to + first);
    });
  }
}

void encode_with_rest(Wire wire, const float* values, int64_t elements, uint8_t* to, float* rest) {
  encode(wire, values, elements, to);
  decode(wire, to, elements, rest);
  for (int64_t i = 0; i < elements; ++i) rest[i] = values[i] - rest[i];
}

}  // namespace lockstep::diloco
