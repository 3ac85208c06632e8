#pragma once

#include <optional>

#include <c10/core/ScalarType.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include <lockstep/group.h>

#include "collectives/shm/kernels/element.h"

// Dtypes and reductions in the terms of the shared-memory core, which knows neither LibTorch nor Group. All
// translations between the three are here.

namespace lockstep {

/// Null for a dtype that the core can move but not reduce.
inline std::optional<shm::DataType> to_core(at::ScalarType dtype) {
  switch (dtype) {
    case at::kFloat:
      return shm::DataType::kFloat32;
    case at::kDouble:
      return shm::DataType::kFloat64;
    case at::kHalf:
      return shm::DataType::kFloat16;
    case at::kBFloat16:
      return shm::DataType::kBFloat16;
    case at::kChar:
      return shm::DataType::kInt8;
    case at::kByte:
      return shm::DataType::kUInt8;
    case at::kShort:
      return shm::DataType::kInt16;
    case at::kInt:
      return shm::DataType::kInt32;
    case at::kLong:
      return shm::DataType::kInt64;
    case at::kBool:
      return shm::DataType::kBool;
    case at::kComplexFloat:
      return shm::DataType::kComplex64;
    case at::kComplexDouble:
      return shm::DataType::kComplex128;
    default:
      return std::nullopt;
  }
}

/// Every dtype can be moved; the ranks compare which one it is.
inline shm::DataType to_moved(at::ScalarType dtype) {
  if (const auto known = to_core(dtype)) return *known;
  switch (dtype) {
    case at::ScalarType::ComplexHalf:
      return shm::DataType::kComplex32;
    case at::ScalarType::Float8_e5m2:
      return shm::DataType::kFloat8E5M2;
    case at::ScalarType::Float8_e4m3fn:
      return shm::DataType::kFloat8E4M3Fn;
    case at::ScalarType::Float8_e5m2fnuz:
      return shm::DataType::kFloat8E5M2Fnuz;
    case at::ScalarType::Float8_e4m3fnuz:
      return shm::DataType::kFloat8E4M3Fnuz;
    case at::ScalarType::Float8_e8m0fnu:
      return shm::DataType::kFloat8E8M0Fnu;
    case at::ScalarType::UInt16:
      return shm::DataType::kUInt16;
    case at::ScalarType::UInt32:
      return shm::DataType::kUInt32;
    case at::ScalarType::UInt64:
      return shm::DataType::kUInt64;
    case at::ScalarType::QInt8:
      return shm::DataType::kQInt8;
    case at::ScalarType::QUInt8:
      return shm::DataType::kQUInt8;
    case at::ScalarType::QInt32:
      return shm::DataType::kQInt32;
    default:
      return shm::DataType::kOther;
  }
}

/// The dtype's name in PyTorch and in the messages of every engine: "float32".
inline const char* dtype_name(at::ScalarType dtype) { return shm::name(to_moved(dtype)); }

namespace detail {

// Group's ReduceOp, the core's and c10d's number their reductions alike; Group has the first seven of nine.
constexpr bool is_numbered_alike(ReduceOp op, shm::ReduceOp core) {
  return static_cast<int>(op) == static_cast<int>(core);
}
constexpr bool is_numbered_alike(shm::ReduceOp core, c10d::ReduceOp::RedOpType op) {
  return static_cast<int>(op) == static_cast<int>(core);
}
static_assert(is_numbered_alike(ReduceOp::kSum, shm::ReduceOp::kSum) &&
              is_numbered_alike(ReduceOp::kMean, shm::ReduceOp::kMean) &&
              is_numbered_alike(ReduceOp::kProduct, shm::ReduceOp::kProduct) &&
              is_numbered_alike(ReduceOp::kMin, shm::ReduceOp::kMin) &&
              is_numbered_alike(ReduceOp::kMax, shm::ReduceOp::kMax) &&
              is_numbered_alike(ReduceOp::kAnd, shm::ReduceOp::kAnd) &&
              is_numbered_alike(ReduceOp::kOr, shm::ReduceOp::kOr));
static_assert(is_numbered_alike(shm::ReduceOp::kSum, c10d::ReduceOp::SUM) &&
              is_numbered_alike(shm::ReduceOp::kMean, c10d::ReduceOp::AVG) &&
              is_numbered_alike(shm::ReduceOp::kProduct, c10d::ReduceOp::PRODUCT) &&
              is_numbered_alike(shm::ReduceOp::kMin, c10d::ReduceOp::MIN) &&
              is_numbered_alike(shm::ReduceOp::kMax, c10d::ReduceOp::MAX) &&
              is_numbered_alike(shm::ReduceOp::kAnd, c10d::ReduceOp::BAND) &&
              is_numbered_alike(shm::ReduceOp::kOr, c10d::ReduceOp::BOR) &&
              is_numbered_alike(shm::ReduceOp::kXor, c10d::ReduceOp::BXOR) &&
              is_numbered_alike(shm::ReduceOp::kPremulSum, c10d::ReduceOp::PREMUL_SUM));

}  // namespace detail

constexpr shm::ReduceOp to_core(ReduceOp op) { return static_cast<shm::ReduceOp>(op); }

inline shm::ReduceOp to_core(const c10d::ReduceOp& op) {
  TORCH_CHECK_VALUE(static_cast<int>(op.op_) < shm::kReduceOps, "unknown reduce op ", static_cast<int>(op.op_));
  return static_cast<shm::ReduceOp>(op.op_);
}

inline c10d::ReduceOp to_c10d(ReduceOp op) { return static_cast<c10d::ReduceOp::RedOpType>(op); }

}  // namespace lockstep
