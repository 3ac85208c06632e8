#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

namespace lockstep {

/// Detects parameters added by refresh() that no optimizer changes although they get gradients. The user must add them
/// to the optimizer, and nothing else reveals an omission.
class UntrainedWatch {
 public:
  /// Tells that refresh() has replaced `before` by `now`.
  void refreshed(const NamedTensors& before, const NamedTensors& now);

  /// Called after a reduction. Returns a warning, once for each parameter; usually empty. A parameter must stay
  /// unchanged for several reductions after its first gradient, because a step may be legitimately omitted: a learning
  /// rate that starts at 0, a gradient that is not finite, or several backward passes per step.
  std::string after_reduction();

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    uint64_t values = 0;  ///< a hash of its values when it got its first gradient
    int reductions = -1;  ///< since then; -1: no gradient yet
  };

  std::vector<Parameter> parameters_;
};

}  // namespace lockstep
