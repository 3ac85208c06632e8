#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/named_tensors.h>

namespace lockstep {

/// Notices parameters that came with refresh() and that no optimizer changes, though they get gradients: their place in
/// the optimizer is the user's to give, and a forgotten one shows in nothing else.
class UntrainedWatch {
 public:
  /// refresh() has put `now` in the place of `before`.
  void refreshed(const NamedTensors& before, const NamedTensors& now);

  /// After a reduction. A text for a warning, once for each parameter; usually empty. A parameter must stay as it is
  /// for many reductions after its first gradient: steps are left out for good reasons, such as a learning rate that
  /// starts at 0, a gradient that is not finite, or several backward passes a step.
  std::string after_reduction();

 private:
  struct Parameter {
    std::string name;
    at::Tensor tensor;
    uint64_t values = 0;  ///< a hash of them, when it had its first gradient
    int reductions = -1;  ///< since then; -1: it had none
  };

  std::vector<Parameter> parameters_;
};

}  // namespace lockstep
