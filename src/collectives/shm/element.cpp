#include "collectives/shm/element.h"

#include <array>

namespace lockstep::shm {

const char* name(DataType type) {
  static constexpr std::array<const char*, kDataTypes> kNames{"float32", "float64", "float16",   "bfloat16",
                                                              "int8",    "uint8",   "int16",     "int32",
                                                              "int64",   "bool",    "complex64", "complex128"};
  return kNames.at(static_cast<size_t>(type));
}

const char* name(ReduceOp op) {
  static constexpr std::array<const char*, kReduceOps> kNames{"sum", "mean", "product", "min",       "max",
                                                              "and", "or",   "xor",     "premul_sum"};
  return kNames.at(static_cast<size_t>(op));
}

}  // namespace lockstep::shm
