#pragma once

#include <cstdint>

#include <lockstep/diloco.h>

namespace lockstep::diloco {

/// Numbers that share a scale.
inline constexpr int64_t kBlock = 64;

/// As ranks compare it: "int8".
const char* name_of(Wire wire);

/// The bytes of so many numbers: for integers the scales of all blocks, 2 bytes each, then the numbers; two of kInt4
/// share a byte.
int64_t encoded_bytes(Wire wire, int64_t elements);

/// REQUIRES: the numbers are finite.
void encode(Wire wire, const float* values, int64_t elements, uint8_t* to);
/// The numbers are finite.
void decode(Wire wire, const uint8_t* from, int64_t elements, float* to);

/// encode(); rest := values - what decode() gives back.
void encode_with_rest(Wire wire, const float* values, int64_t elements, uint8_t* to, float* rest);

}  // namespace lockstep::diloco
