#include "checkpoint/scalar_type.h"

#include <stdexcept>
#include <utility>

namespace lockstep {
namespace {

constexpr std::pair<at::ScalarType, const char*> kNames[] = {{at::kFloat, "float32"},
                                                             {at::kDouble, "float64"},
                                                             {at::kHalf, "float16"},
                                                             {at::kBFloat16, "bfloat16"},
                                                             {at::kLong, "int64"},
                                                             {at::kInt, "int32"},
                                                             {at::kShort, "int16"},
                                                             {at::kChar, "int8"},
                                                             {at::kByte, "uint8"},
                                                             {at::kBool, "bool"},
                                                             {at::kComplexFloat, "complex64"},
                                                             {at::kComplexDouble, "complex128"},
                                                             {at::kComplexHalf, "complex32"},
                                                             {at::kUInt16, "uint16"},
                                                             {at::kUInt32, "uint32"},
                                                             {at::kUInt64, "uint64"},
                                                             {at::kFloat8_e4m3fn, "float8_e4m3fn"},
                                                             {at::kFloat8_e5m2, "float8_e5m2"},
                                                             {at::kFloat8_e4m3fnuz, "float8_e4m3fnuz"},
                                                             {at::kFloat8_e5m2fnuz, "float8_e5m2fnuz"},
                                                             {at::kFloat8_e8m0fnu, "float8_e8m0fnu"}};

}  // namespace

const Dtype* dtype_of(at::ScalarType type) {
  for (const auto& [known, name] : kNames)
    if (known == type) return dtype_of_name(name);
  return nullptr;
}

at::ScalarType scalar_type_of(const Dtype& dtype) {
  for (const auto& [type, name] : kNames)
    if (dtype_of_name(name) == &dtype) return type;
  throw std::logic_error("a dtype of files is unknown to torch");
}

}  // namespace lockstep
