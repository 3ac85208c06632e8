#pragma once

#include <cstdint>

namespace lockstep {

/// A bijection of 64-bit numbers in which every bit of the result depends on every bit of `x`. Steele, Lea and Flood,
/// "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014, with the constants of David Stafford's variant 13.
constexpr uint64_t scramble(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

/// 2^64 over the golden ratio: the increment of that generator's state.
constexpr uint64_t kGoldenStep = 0x9e3779b97f4a7c15;

/// The seed of one sample at one place in a chain of transforms.
constexpr uint64_t sample_seed(uint64_t seed, int epoch, int64_t index, int place) {
  uint64_t mixed = scramble(seed + kGoldenStep);
  mixed = scramble(mixed + static_cast<uint64_t>(epoch) + kGoldenStep);
  mixed = scramble(mixed + static_cast<uint64_t>(index) + kGoldenStep);
  return scramble(mixed + static_cast<uint64_t>(place) + kGoldenStep);
}

}  // namespace lockstep
