#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

namespace lockstep {

/// The norm of CPU gradients, as one vector. Each gradient counts in blocks of kBlock elements, in memory order, and
/// the blocks are added one after the other. So the bits do not depend on which rank or thread computes which block.
class GradientNorm {
 public:
  static constexpr int64_t kBlock = 2048;
  static int64_t blocks_of(int64_t elements) { return (elements + kBlock - 1) / kBlock; }
  /// Whether GradientNorm supports the gradient: float, double, float16 or bfloat16, without gaps, on the CPU.
  static bool takes(const at::Tensor& gradient);

  /// `type` > 0, or infinity.
  explicit GradientNorm(double type) : type_(type) {}

  /// The contribution of a block of up to kBlock elements: the sum of |x|^type, or the largest |x|.
  double of_block(at::ScalarType dtype, const void* elements, int64_t count) const;
  void add(double block);
  /// Adds all blocks of a gradient that takes() accepts.
  void add(const at::Tensor& gradient);
  double norm() const;

 private:
  double type_, total_ = 0;
};

}  // namespace lockstep
