#include "collectives/shm/kernels/element.h"

#include <array>

namespace lockstep::shm {

const char* name(DataType type) {
  static constexpr std::array<const char*, kMovedDataTypes> kNames{
      "float32",         "float64",         "float16",        "bfloat16",    "int8",
      "uint8",           "int16",           "int32",          "int64",       "bool",
      "complex64",       "complex128",      "complex32",      "float8_e5m2", "float8_e4m3fn",
      "float8_e5m2fnuz", "float8_e4m3fnuz", "float8_e8m0fnu", "uint16",      "uint32",
      "uint64",          "qint8",           "quint8",         "qint32",      "bytes of another dtype"};
  const auto number = static_cast<size_t>(type);
  return number < kNames.size() ? kNames[number] : "an unknown dtype";
}

const char* name(ReduceOp op) {
  static constexpr std::array<const char*, kReduceOps> kNames{"sum", "mean", "product", "min",       "max",
                                                              "and", "or",   "xor",     "premul_sum"};
  const auto number = static_cast<size_t>(op);
  return number < kNames.size() ? kNames[number] : "an unknown op";
}

}  // namespace lockstep::shm
