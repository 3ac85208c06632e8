#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace lockstep::shm {

/// An element's type. Values are sent between ranks: append only.
enum class DataType : uint8_t {
  kFloat32,
  kFloat64,
  kFloat16,
  kBFloat16,
  kInt8,
  kUInt8,
  kInt16,
  kInt32,
  kInt64,
  kBool,
  kComplex64,
  kComplex128,
  // The following can be moved, but not reduced.
  kComplex32,
  kFloat8E5M2,
  kFloat8E4M3Fn,
  kFloat8E5M2Fnuz,
  kFloat8E4M3Fnuz,
  kFloat8E8M0Fnu,
  kUInt16,
  kUInt32,
  kUInt64,
  kQInt8,
  kQUInt8,
  kQInt32,
  kOther,  ///< counted in bytes
};
inline constexpr int kDataTypes = 12;       ///< that can be reduced
inline constexpr int kMovedDataTypes = 25;  ///< including those that cannot

/// How the ranks' elements are combined. kMean divides the sum by the number of ranks (integers: towards zero);
/// kPremulSum adds factor * element, where each rank has its own factor. Values are sent between ranks: append only.
enum class ReduceOp : uint8_t { kSum, kMean, kProduct, kMin, kMax, kAnd, kOr, kXor, kPremulSum };
inline constexpr int kReduceOps = 9;

constexpr size_t element_bytes(DataType type) {
  constexpr std::array<size_t, kMovedDataTypes> kBytes{4, 8, 2, 2, 1, 1, 2, 4, 8, 1, 8, 16, 4,
                                                       1, 1, 1, 1, 1, 2, 4, 8, 1, 1, 4, 1};
  return kBytes[static_cast<size_t>(type)];
}
const char* name(DataType type);
const char* name(ReduceOp op);

}  // namespace lockstep::shm
