#include "collectives/shm/kernels/reduce.h"

#include <bit>
#include <cstring>

namespace lockstep::shm {
namespace {

/// Holds the sum of any ranks' int64.
__extension__ using Wide = __int128;

// Buffers may lie at any address.
template <typename T>
T load(const Reduction& reduction, int input, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(reduction.inputs[input]) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(const Reduction& reduction, size_t i, T value) {
  for (int output = 0; output < reduction.output_count; ++output)
    std::memcpy(static_cast<std::byte*>(reduction.outputs[output]) + i * sizeof(T), &value, sizeof(T));
}

template <typename T>
void average(const Reduction& reduction) {
  static_assert(sizeof(T) <= sizeof(int64_t));
  for (size_t i = 0; i < reduction.count; ++i) {
    Wide sum = 0;
    for (int input = 0; input < reduction.input_count; ++input) sum += load<T>(reduction, input, i);
    const auto narrow = static_cast<int64_t>(sum);  // is divided many times faster
    store(reduction, i, static_cast<T>(narrow == sum ? narrow / reduction.input_count : sum / reduction.input_count));
  }
}

template <typename T>
struct Complex {
  T real, imaginary;
};

/// The tree of reduce.h over inputs [first, first + count), of element i.
template <typename T>
Complex<T> complex_product(const Reduction& reduction, size_t i, int first, int count) {
  if (count == 1) return load<Complex<T>>(reduction, first, i);
  const auto left = static_cast<int>(std::bit_floor(static_cast<unsigned>(count - 1)));
  const auto a = complex_product<T>(reduction, i, first, left);
  const auto b = complex_product<T>(reduction, i, first + left, count - left);
  return {a.real * b.real - a.imaginary * b.imaginary, a.real * b.imaginary + a.imaginary * b.real};
}

template <typename T>
void complex_product(const Reduction& reduction) {
  for (size_t i = 0; i < reduction.count; ++i)
    store(reduction, i, complex_product<T>(reduction, i, 0, reduction.input_count));
}

}  // namespace

ReduceFunction find_reduce_rare(DataType type, ReduceOp op) {
  if (op == ReduceOp::kProduct && type == DataType::kComplex64) return complex_product<float>;
  if (op == ReduceOp::kProduct && type == DataType::kComplex128) return complex_product<double>;
  if (op != ReduceOp::kMean) return nullptr;
  switch (type) {
    case DataType::kInt8:
      return average<int8_t>;
    case DataType::kUInt8:
      return average<uint8_t>;
    case DataType::kInt16:
      return average<int16_t>;
    case DataType::kInt32:
      return average<int32_t>;
    case DataType::kInt64:
      return average<int64_t>;
    default:
      return nullptr;
  }
}

}  // namespace lockstep::shm
