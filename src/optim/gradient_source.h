#pragma once

#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>

#include "collectives/shm/kernels/reduce.h"

namespace lockstep::optim {

/// The places from which a step reads a parameter's gradient: one, or several whose sum it is.
struct GradientSource {
  at::Tensor kept{};                    ///< keeps the memory alive, if nothing else does
  std::vector<const std::byte*> parts;  ///< the address, or one per rank in rank order
  shm::ReduceFunction sum = nullptr;    ///< adds several parts, as an all-reduce does
  std::vector<double> factors{};        ///< of the sum, applied one after the other, each with a rounding
  shm::ReduceFunction scale = nullptr;  ///< kPremulSum of one input

  /// Whether the gradient can be read directly.
  bool is_plain() const { return parts.size() == 1 && factors.empty(); }
  /// For gradients that are not plain: writes `count` elements, from byte `at` on, to `to`.
  void load(void* to, size_t at, size_t count) const;
  void multiply(void* elements, size_t count, double factor) const;
};

}  // namespace lockstep::optim
