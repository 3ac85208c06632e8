#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

namespace lockstep::diloco {

/// The parameters of each fragment, by their places in the list, in its order: about as many numbers in each, and at
/// least one parameter.
/// REQUIRES: 1 <= fragments <= sizes.size().
std::vector<std::vector<size_t>> fragments_of(const std::vector<int64_t>& sizes, int64_t fragments);

/// Parameters that are synchronised together, seen as one row of floats: one after the other, each contiguous.
class Fragment {
 public:
  explicit Fragment(std::vector<at::Tensor> parameters);

  const std::vector<at::Tensor>& parameters() const { return parameters_; }
  int64_t elements() const { return elements_; }

  /// The numbers from `begin` on, as a float tensor on the CPU; zeros beyond the end.
  at::Tensor read(int64_t begin, int64_t elements) const;
  /// Every parameter becomes outer + keep * (own - outer), computed in float. `outer`: at least elements() floats. Some
  /// parameters are shared by the ranks of a machine: these are left to the rank that `writes_shared`.
  void write(const at::Tensor& outer, double keep, bool writes_shared) const;

 private:
  std::vector<at::Tensor> parameters_;
  int64_t elements_ = 0;
};

}  // namespace lockstep::diloco
