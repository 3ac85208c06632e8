#include "collectives/shm/reduce_sets.h"

#include <cstring>

namespace lockstep::shm {
namespace {

// Buffers may lie at any address.
template <typename T>
T load(const Reduction& task, int input, size_t i) {
  T value;
  std::memcpy(&value, static_cast<const std::byte*>(task.inputs[input]) + i * sizeof(T), sizeof(T));
  return value;
}

template <typename T>
void store(const Reduction& task, size_t i, T value) {
  for (int output = 0; output < task.output_count; ++output)
    std::memcpy(static_cast<std::byte*>(task.outputs[output]) + i * sizeof(T), &value, sizeof(T));
}

template <typename T>
void average(const Reduction& task) {
  for (size_t i = 0; i < task.count; ++i) {
    // Unsigned, because the sum may wrap.
    unsigned long long sum = 0;
    for (int input = 0; input < task.input_count; ++input)
      sum += static_cast<unsigned long long>(static_cast<long long>(load<T>(task, input, i)));
    store(task, i, static_cast<T>(static_cast<long long>(sum) / task.input_count));
  }
}

template <typename T>
struct Complex {
  T real, imaginary;
};

template <typename T>
void complex_product(const Reduction& task) {
  for (size_t i = 0; i < task.count; ++i) {
    auto product = load<Complex<T>>(task, 0, i);
    for (int input = 1; input < task.input_count; ++input) {
      const auto factor = load<Complex<T>>(task, input, i);
      product = {product.real * factor.real - product.imaginary * factor.imaginary,
                 product.real * factor.imaginary + product.imaginary * factor.real};
    }
    store(task, i, product);
  }
}

}  // namespace

ReduceFunction find_reduce_rare(DataType type, ReduceOp op) {
  if (op == ReduceOp::kProduct && type == DataType::kComplex64) return complex_product<float>;
  if (op == ReduceOp::kProduct && type == DataType::kComplex128) return complex_product<double>;
  if (op != ReduceOp::kAverage) return nullptr;
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
