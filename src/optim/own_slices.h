#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "checkpoint/optimizer_kind.h"
#include "optim/areas.h"
#include "optim/slice_stepper.h"

namespace lockstep::detail {

/// Elements [begin, begin + count) of a tensor, in the memory order of `parameter`.
at::Tensor flat_part(const at::Tensor& tensor, const at::Tensor& parameter, int64_t begin, int64_t count);

/// Lets an optimizer's own step() work on this rank's slices of the areas. During that call, this rank's parts replace
/// the parameters in the optimizer's groups, flat, with the same part of the gradient.
///
/// If the kind of state is known, the optimizer's map holds it between steps, in the areas' arrays: views of them in
/// the parameters' shapes; on a device this rank's parts, flat, until complete(). A master is one of these arrays: an
/// own_step() that steps masters finds it in the map.
class OwnSlices final : public SliceStepper {
 public:
  /// `kind` is the kind of state; none: only the optimizer knows it, and it belongs to the slices.
  OwnSlices(Areas& areas, std::optional<OptimizerKind> kind, void (*own_step)(torch::optim::Optimizer&));
  OwnSlices(const OwnSlices&) = delete;
  OwnSlices& operator=(const OwnSlices&) = delete;

  Outlook prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) override;
  int64_t run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) override;
  void complete(torch::optim::Optimizer& optimizer) override;
  void check_state_is_known() const override;

 private:
  /// The slice of the parameter at the same index in areas_.
  struct Slice {
    at::Tensor tensor;        ///< this rank's part of the parameter, flat
    bool is_stepped = false;  ///< in the current step
  };
  class Exchanged;

  void bring_state(torch::optim::Optimizer& optimizer, size_t place);
  void take_state(torch::optim::Optimizer& optimizer, size_t place);
  /// Copies stepped slices to the other ranks, if ranks share memory.
  void copy_to_others() const;

  Areas& areas_;
  const std::optional<OptimizerKind> kind_;
  void (*const own_step_)(torch::optim::Optimizer&);
  std::vector<Slice> slices_;
  bool is_complete_ = false;  ///< on a device: the optimizer's map holds whole tensors
  int64_t runs_ = 0;
};

}  // namespace lockstep::detail
