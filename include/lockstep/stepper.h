#pragma once

#include <lockstep/cxx20.h>

#include <cstdint>
#include <utility>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/elementwise_optimizers.h>

namespace lockstep {
class Group;
}

namespace lockstep::detail {

/// How an optimizer's class takes steps.
struct StepKind {
  FormulaKind formula = FormulaKind::kNone;
  bool state_is_known = false;
  /// The class's own step(), even if a derived class overrides it.
  void (*own_step)(torch::optim::Optimizer& optimizer) = nullptr;
};

/// Takes the steps of an optimizer: of one process (src/optim/local_step.cpp), or together with other ranks
/// (src/optim/sharded_step.h).
class Stepper {
 public:
  virtual ~Stepper() = default;
  virtual void step() = 0;
  /// TORCH_CHECK fails if only the optimizer knows the meaning of its state.
  virtual void check_state_is_known() const {}
  /// Makes the tensors in the optimizer's map whole until the next step.
  /// REQUIRES: every rank calls it if ranks share no memory.
  virtual void complete_state() {}
  /// Null if each rank can access all of the state.
  virtual const Group* slice_holders() const { return nullptr; }
  // As in KeepsSlices.
  virtual bool is_never_whole() const { return false; }
  virtual void show_slices() {}
  virtual at::IntArrayRef sizes_of(const at::Tensor& parameter) const { return parameter.sizes(); }
  virtual std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& /*parameter*/, const at::Tensor& value) const {
    return {0, value.numel()};
  }
  /// Whether tensors of a loaded state may stay as they are until the next step.
  virtual bool adopts_state() const { return false; }
  /// Called when the optimizer has moved.
  virtual void move_to(torch::optim::Optimizer& optimizer) = 0;
};

}  // namespace lockstep::detail
