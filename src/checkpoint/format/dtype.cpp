#include "checkpoint/format/dtype.h"

#include <algorithm>
#include <iterator>

namespace lockstep {
namespace {

constexpr Dtype kDtypes[] = {{"float32", "FloatStorage", "F32", 4},
                             {"float64", "DoubleStorage", "F64", 8},
                             {"float16", "HalfStorage", "F16", 2},
                             {"bfloat16", "BFloat16Storage", "BF16", 2},
                             {"int64", "LongStorage", "I64", 8},
                             {"int32", "IntStorage", "I32", 4},
                             {"int16", "ShortStorage", "I16", 2},
                             {"int8", "CharStorage", "I8", 1},
                             {"uint8", "ByteStorage", "U8", 1},
                             {"bool", "BoolStorage", "BOOL", 1},
                             {"complex64", "ComplexFloatStorage", "C64", 8},
                             {"complex128", "ComplexDoubleStorage", nullptr, 16},
                             {"complex32", nullptr, nullptr, 4},
                             {"uint16", nullptr, "U16", 2},
                             {"uint32", nullptr, "U32", 4},
                             {"uint64", nullptr, "U64", 8},
                             {"float8_e4m3fn", nullptr, "F8_E4M3", 1},
                             {"float8_e5m2", nullptr, "F8_E5M2", 1},
                             {"float8_e4m3fnuz", nullptr, nullptr, 1},
                             {"float8_e5m2fnuz", nullptr, nullptr, 1},
                             {"float8_e8m0fnu", nullptr, "F8_E8M0", 1}};

const Dtype* find(std::string_view name, const char* Dtype::*member) {
  for (const Dtype& dtype : kDtypes)
    if (dtype.*member != nullptr && name == dtype.*member) return &dtype;
  return nullptr;
}

}  // namespace

const Dtype* dtype_of_name(std::string_view name) { return find(name, &Dtype::name); }
const Dtype* dtype_of_storage(std::string_view storage) { return find(storage, &Dtype::storage); }
const Dtype* dtype_of_safetensors(std::string_view name) { return find(name, &Dtype::safetensors); }

bool is_unsupported_dtype(std::string_view name) {
  for (const char* start : {"qint", "quint", "bits", "int1", "int2", "int3", "int4", "int5", "int6", "int7", "uint1",
                            "uint2", "uint3", "uint4", "uint5", "uint6", "uint7", "float4_", "Q"})
    if (name.starts_with(start)) return true;
  return false;
}

}  // namespace lockstep
