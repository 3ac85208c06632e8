#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "base/hash.h"
#include "collectives/shm/kernels/element.h"

// Inputs on which kernels could differ, and a hash of what they make of them: the same on every processor, so nothing
// here depends on a library's distributions or on how a processor rounds.
namespace lockstep::shm {

struct FloatFormat {
  int bytes, mantissa_bits;
  uint64_t sign() const { return uint64_t{1} << (8 * bytes - 1); }
  uint64_t infinity() const { return (sign() - 1) >> mantissa_bits << mantissa_bits; }
  uint64_t one() const { return infinity() >> 1 >> mantissa_bits << mantissa_bits; }
};

/// Of a complex type its parts'; no bytes for integers.
inline FloatFormat float_format(DataType type) {
  switch (type) {
    case DataType::kFloat32:
    case DataType::kComplex64:
      return {4, 23};
    case DataType::kFloat64:
    case DataType::kComplex128:
      return {8, 52};
    case DataType::kFloat16:
      return {2, 10};
    case DataType::kBFloat16:
      return {2, 7};
    default:
      return {0, 0};
  }
}

/// `count` elements, of which floats are often near 1, so that sums round, and now and then any bits at all, denormal,
/// infinite, a zero with a sign, the largest, or no number.
inline std::vector<std::byte> hard_elements(DataType type, size_t count, unsigned seed) {
  std::mt19937_64 random(seed);
  const size_t bytes = count * element_bytes(type);
  std::vector<std::byte> data(bytes);
  const FloatFormat format = float_format(type);
  const auto width = static_cast<size_t>(format.bytes == 0 ? 1 : format.bytes);
  for (size_t at = 0; at < bytes; at += width) {
    uint64_t bits = random();
    if (format.bytes > 0) {
      const uint64_t mantissa = bits & ((uint64_t{1} << format.mantissa_bits) - 1), sign = bits >> 20 & format.sign();
      switch (random() % 16) {
        case 0:
          break;  // any bits
        case 1:
          bits = sign | mantissa;
          break;
        case 2:
          bits = sign | (random() % 2 == 0 ? format.infinity() : 0);
          break;
        case 3:
          bits = sign | (format.infinity() - 1 - mantissa % 4);
          break;
        case 4:
          bits = random() % 8 == 0 ? sign | format.infinity() | mantissa | 1 : sign | format.one();
          break;
        default:
          bits = sign | (format.one() + (random() % 4 << format.mantissa_bits) + mantissa);
      }
    }
    std::memcpy(data.data() + at, &bits, width);  // little-endian, as everything that Lockstep runs on
  }
  return data;
}

/// A NaN counts as one, whatever its sign and payload: processors differ in them.
inline void add_elements(Hash& hash, DataType type, const std::byte* data, size_t count) {
  const FloatFormat format = float_format(type);
  const size_t bytes = count * element_bytes(type);
  const auto width = static_cast<size_t>(format.bytes == 0 ? 1 : format.bytes);
  for (size_t at = 0; at < bytes; at += width) {
    uint64_t bits = 0;
    std::memcpy(&bits, data + at, width);
    if (format.bytes > 0 && (bits & ~format.sign()) > format.infinity()) bits = ~uint64_t{0};
    hash.add(&bits, sizeof bits);
  }
}

}  // namespace lockstep::shm
