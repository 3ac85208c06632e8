#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <type_traits>
#include <vector>

#include "collectives/shm/kernels/element.h"

// Plain loops over single elements, against which the kernels and collectives are compared. Nothing here is shared
// with the code under test: float16 and bfloat16 are converted by arithmetic on doubles.
namespace lockstep::shm {

using Bytes = std::vector<std::byte>;

/// Which operations are defined for a type: those that c10d allows.
inline bool is_meaningful(DataType type, ReduceOp op) {
  const bool complex = type == DataType::kComplex64 || type == DataType::kComplex128;
  const bool floating = type <= DataType::kBFloat16;
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kProduct:
      return true;
    case ReduceOp::kMean:
      return type != DataType::kBool;
    case ReduceOp::kMin:
    case ReduceOp::kMax:
      return !complex;
    case ReduceOp::kPremulSum:
      return floating || complex;
    default:
      return !floating && !complex;
  }
}

/// A float with `mantissa_bits` of mantissa and `exponent_bits` of exponent in 16 bits.
template <int mantissa_bits, int exponent_bits>
struct SmallFloat {
  uint16_t bits = 0;
  static constexpr int kBias = (1 << (exponent_bits - 1)) - 1;
  static constexpr int kMantissa = 1 << mantissa_bits;

  SmallFloat() = default;
  explicit SmallFloat(float value) {
    const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    const uint16_t infinity = ((1 << exponent_bits) - 1) << mantissa_bits;
    double magnitude = std::fabs(static_cast<double>(value));
    if (std::isnan(value)) {
      bits = static_cast<uint16_t>(infinity | (kMantissa >> 1));
      return;
    }
    int exponent = magnitude > 0 && !std::isinf(magnitude) ? std::ilogb(magnitude) : 1 - kBias;
    if (exponent < 1 - kBias) exponent = 1 - kBias;
    const double steps = std::isinf(magnitude) ? 0 : std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
    // steps counts units in the last place; carrying into the exponent is plain addition.
    const double code = steps + (exponent + kBias - 1) * static_cast<double>(kMantissa);
    bits =
        static_cast<uint16_t>(sign | (std::isinf(magnitude) || code >= infinity ? infinity : static_cast<int>(code)));
  }
  explicit operator float() const {
    const int exponent = (bits >> mantissa_bits) & ((1 << exponent_bits) - 1), mantissa = bits & (kMantissa - 1);
    double value;
    if (exponent == (1 << exponent_bits) - 1)
      value = mantissa ? std::numeric_limits<double>::quiet_NaN() : std::numeric_limits<double>::infinity();
    else if (exponent == 0)
      value = std::ldexp(mantissa, 1 - kBias - mantissa_bits);
    else
      value = std::ldexp(kMantissa + mantissa, exponent - kBias - mantissa_bits);
    return static_cast<float>(bits & 0x8000 ? -value : value);
  }
};
using Float16 = SmallFloat<10, 5>;
using BFloat16 = SmallFloat<7, 8>;

template <typename T>
struct ComplexNumber {
  T real, imaginary;
};

template <typename T>
struct Tag {
  using Type = T;
};
/// Calls f(Tag<T>{}) with the C++ type of `type`.
template <typename F>
auto with_type(DataType type, F f) {
  switch (type) {
    case DataType::kFloat32:
      return f(Tag<float>{});
    case DataType::kFloat64:
      return f(Tag<double>{});
    case DataType::kFloat16:
      return f(Tag<Float16>{});
    case DataType::kBFloat16:
      return f(Tag<BFloat16>{});
    case DataType::kInt8:
      return f(Tag<int8_t>{});
    case DataType::kUInt8:
      return f(Tag<uint8_t>{});
    case DataType::kInt16:
      return f(Tag<int16_t>{});
    case DataType::kInt32:
      return f(Tag<int32_t>{});
    case DataType::kInt64:
      return f(Tag<int64_t>{});
    case DataType::kBool:
      return f(Tag<bool>{});
    case DataType::kComplex64:
      return f(Tag<ComplexNumber<float>>{});
    default:
      return f(Tag<ComplexNumber<double>>{});
  }
}

/// One element of the result, by the definition.
template <typename T>
struct ReferenceElement {
  static constexpr bool kSmall = std::is_same_v<T, Float16> || std::is_same_v<T, BFloat16>;
  using Wide = std::conditional_t<kSmall, float, T>;

  template <typename F>
  static F combine(ReduceOp op, F a, F b) {
    if (op == ReduceOp::kProduct) return a * b;
    if (op == ReduceOp::kMin) return b < a ? b : a;
    if (op == ReduceOp::kMax) return b > a ? b : a;
    return a + b;
  }

  /// The tree over x[first, first + count).
  template <typename F, typename Combine>
  static F reduce_tree(const std::vector<F>& x, size_t first, size_t count, const Combine& combine) {
    if (count == 1) return x[first];
    const size_t left = std::bit_floor(count - 1);
    return combine(reduce_tree(x, first, left, combine), reduce_tree(x, first + left, count - left, combine));
  }

  template <typename F>
  static F reduce_float(ReduceOp op, std::vector<F> x, const std::vector<double>& factors) {
    if (op == ReduceOp::kPremulSum)
      for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<F>(factors[i]);
    const F result = reduce_tree(x, 0, x.size(), [op](F a, F b) {
      volatile F rounded = combine(op, a, b);
      return static_cast<F>(rounded);
    });
    return op == ReduceOp::kMean ? result / static_cast<F>(x.size()) : result;
  }

  static T reduce_integer(ReduceOp op, const std::vector<T>& x) {
    __int128 sofar = x[0];
    for (size_t i = 1; i < x.size(); ++i) {
      const __int128 next = x[i];
      if (op == ReduceOp::kProduct)
        sofar = static_cast<int64_t>(static_cast<uint64_t>(sofar) * static_cast<uint64_t>(next));
      if (op == ReduceOp::kSum || op == ReduceOp::kMean) sofar += next;
      if (op == ReduceOp::kMin) sofar = next < sofar ? next : sofar;
      if (op == ReduceOp::kMax) sofar = next > sofar ? next : sofar;
      if (op == ReduceOp::kAnd) sofar &= next;
      if (op == ReduceOp::kOr) sofar |= next;
      if (op == ReduceOp::kXor) sofar ^= next;
    }
    if (op == ReduceOp::kMean) sofar /= static_cast<int64_t>(x.size());
    return static_cast<T>(sofar);
  }

  static T reduce(ReduceOp op, const std::vector<T>& x, const std::vector<double>& factors) {
    if constexpr (std::is_same_v<T, bool>) {
      bool sofar = x[0];
      for (size_t i = 1; i < x.size(); ++i) {
        const bool next = x[i];
        const bool any = op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kOr;
        sofar = op == ReduceOp::kXor ? sofar != next : any ? sofar || next : sofar && next;
      }
      return sofar;
    } else if constexpr (std::is_integral_v<T>) {
      return reduce_integer(op, x);
    } else if constexpr (std::is_floating_point_v<T>) {
      return reduce_float(op, x, factors);
    } else if constexpr (kSmall) {
      std::vector<float> wide;
      for (T element : x) wide.push_back(static_cast<float>(element));
      return T(reduce_float(op, wide, factors));
    } else {
      using F = decltype(T::real);
      std::vector<F> real, imaginary;
      for (T element : x) real.push_back(element.real), imaginary.push_back(element.imaginary);
      if (op != ReduceOp::kProduct) return {reduce_float(op, real, factors), reduce_float(op, imaginary, factors)};
      return reduce_tree(x, 0, x.size(), [](T a, T b) {
        volatile F rr = a.real * b.real, ii = a.imaginary * b.imaginary;
        volatile F ri = a.real * b.imaginary, ir = a.imaginary * b.real;
        return T{static_cast<F>(rr - ii), static_cast<F>(ri + ir)};
      });
    }
  }
};

inline Bytes reference_reduce(DataType type, ReduceOp op, const std::vector<Bytes>& inputs,
                              const std::vector<double>& factors = {}) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    Bytes result(inputs[0].size());
    std::vector<T> x(inputs.size());
    for (size_t i = 0; i < result.size() / sizeof(T); ++i) {
      for (size_t rank = 0; rank < inputs.size(); ++rank) {
        T element;
        std::memcpy(&element, inputs[rank].data() + i * sizeof(T), sizeof(T));
        x[rank] = element;
      }
      const T value = ReferenceElement<T>::reduce(op, x, factors);
      std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
    }
    return result;
  });
}

/// Elements whose reductions neither overflow nor become NaN, so that bits can be compared.
inline Bytes random_elements(DataType type, ReduceOp op, size_t count, unsigned seed) {
  return with_type(type, [&](auto tag) {
    using T = typename decltype(tag)::Type;
    std::mt19937_64 random(seed);
    std::uniform_real_distribution<double> real(op == ReduceOp::kProduct ? 0.8 : -4.0,
                                                op == ReduceOp::kProduct ? 1.2 : 4.0);
    Bytes result(count * sizeof(T));
    for (size_t i = 0; i < count; ++i) {
      T value;
      if constexpr (std::is_same_v<T, bool>)
        value = random() % 2 == 0;
      else if constexpr (std::is_integral_v<T>)
        value = static_cast<T>(random());
      else if constexpr (std::is_floating_point_v<T>)
        value = static_cast<T>(real(random));
      else if constexpr (sizeof(T) == 2)
        value = T(static_cast<float>(real(random)));
      else
        value = {static_cast<decltype(T::real)>(real(random)), static_cast<decltype(T::real)>(real(random))};
      std::memcpy(result.data() + i * sizeof(T), &value, sizeof(T));
    }
    return result;
  });
}

inline bool same_elements(DataType type, const std::byte* a, const std::byte* b, size_t count) {
  return count == 0 || std::memcmp(a, b, count * element_bytes(type)) == 0;
}

}  // namespace lockstep::shm
