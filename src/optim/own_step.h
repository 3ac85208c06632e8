#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "checkpoint/optimizer_kind.h"
#include "optim/areas.h"

namespace lockstep::detail {

/// [begin, begin + count) of a tensor's elements in the order in which `parameter` lies in memory.
at::Tensor flat_part(const at::Tensor& tensor, const at::Tensor& parameter, int64_t begin, int64_t count);

/// Lets an optimizer's own step() work on this rank's slices of the areas: for that call, parts of parameters that lie
/// in the slice take the parameters' places in the optimizer's groups, flat, with the same part of the gradient.
///
/// Where it is known what is remembered of parameters, the optimizer's map holds it between steps, in the areas'
/// arrays: views of them in the parameters' shapes; on a device this rank's parts, flat, until complete(). A master is
/// one of these arrays: own_step() that steps masters finds it in the map.
class OwnStep {
 public:
  /// `kind`: what is remembered; none: only the optimizer knows, and it belongs to the slices.
  OwnStep(Areas& areas, std::optional<OptimizerKind> kind);
  OwnStep(const OwnStep&) = delete;
  OwnStep& operator=(const OwnStep&) = delete;

  const std::optional<OptimizerKind>& kind() const { return kind_; }

  /// This rank's part of a parameter's gradient, flat, in the parameter's dtype; undefined: the parameter is not
  /// stepped.
  using GradientOf = std::function<at::Tensor(const Areas::Parameter& parameter)>;
  /// No messages. The slices have yet to reach the other ranks.
  void run(torch::optim::Optimizer& optimizer, const GradientOf& gradient_of, const std::function<void()>& own_step);
  /// In the last run().
  bool is_stepped(const Areas::Parameter& parameter) const {
    return slices_[areas_.place_of(parameter.tensor)].is_stepped;
  }

  /// Makes what the optimizer's map holds whole, until the next run(). Every rank calls it where ranks share no memory;
  /// on a device, calls that follow find it done and send nothing.
  void complete(torch::optim::Optimizer& optimizer);

 private:
  /// Of a parameter in areas_, at the same place.
  struct Slice {
    at::Tensor tensor;        ///< this rank's part of the parameter, flat
    bool is_stepped = false;  ///< in the present step
  };
  class Exchanged;

  void bring_state(torch::optim::Optimizer& optimizer, size_t place);
  void take_state(torch::optim::Optimizer& optimizer, size_t place);

  Areas& areas_;
  const std::optional<OptimizerKind> kind_;
  std::vector<Slice> slices_;
  bool is_complete_ = false;  ///< on a device: the optimizer's map holds whole tensors
};

}  // namespace lockstep::detail
