#pragma once

#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

namespace lockstep {

/// The float copy of a 16-bit parameter, with the parameter's shape and strides: it holds the precision that 16 bits
/// lack.
struct Master {
  virtual ~Master() = default;
  at::Tensor master_param;
};

/// A parameter's state of LibTorch's own type, with its master.
template <typename State>
class WithMaster final : public State, public Master {
  std::unique_ptr<torch::optim::OptimizerParamState> clone() const override {
    return std::make_unique<WithMaster>(*this);
  }
};

}  // namespace lockstep
