#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::optim {

/// Where a step reads a parameter's gradient: in one place, or in several whose sum it is.
struct GradientSource {
  at::Tensor kept{};                    ///< what is read, if nobody else keeps it
  std::vector<const std::byte*> parts;  ///< where it begins: in one place, or of each rank in their order
  shm::ReduceFunction sum = nullptr;    ///< of several parts, as an all-reduce takes it
  std::vector<double> factors{};        ///< that is multiplied by these, one after the other, with a rounding each
  shm::ReduceFunction scale = nullptr;  ///< kPremulSum of one input

  /// Whether it lies somewhere as it is.
  bool is_plain() const { return parts.size() == 1 && factors.empty(); }
  /// For what is not plain: puts `count` elements, from byte `at` on, into `to`.
  void load(void* to, size_t at, size_t count) const;
  /// Multiplies elements by a factor, in place.
  void multiply(void* elements, size_t count, double factor) const;
};

}  // namespace lockstep::optim
