#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <lockstep/replica.h>
#include <lockstep/stepper.h>

namespace lockstep {
struct ZeroRedundancyOptions;
}

namespace lockstep::detail {

/// A model of whose parameters each rank holds parts, which an optimizer steps. The parts are flat tensors, one for
/// each parameter that the model trains, empty where this rank holds nothing of it.
class ShardedModel {
 public:
  virtual ~ShardedModel() = default;
  /// The parts of all parameters that it trains, in the order of the module.
  virtual std::vector<at::Tensor> parts() const = 0;
  /// The groups with each parameter replaced by its part. TORCH_CHECK fails unless they hold all parameters that the
  /// model trains.
  virtual std::vector<torch::optim::OptimizerParamGroup> parts_of(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const = 0;
  /// Makes the stepper of `optimizer`, which has such groups. Every rank must call it.
  virtual std::unique_ptr<Stepper> make_stepper(torch::optim::Optimizer& optimizer, const StepKind& kind,
                                                const ZeroRedundancyOptions& options) const = 0;
};

/// Models whose ranks step them together.
template <typename Model>
concept OfRanks = std::derived_from<Model, Replica> || std::derived_from<Model, ShardedModel>;

inline std::vector<at::Tensor> trained_parameters(const ShardedModel& model) { return model.parts(); }
inline const std::vector<torch::optim::OptimizerParamGroup>& groups_in(
    const Replica& /*model*/, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  return groups;
}
inline std::vector<torch::optim::OptimizerParamGroup> groups_in(
    const ShardedModel& model, const std::vector<torch::optim::OptimizerParamGroup>& groups) {
  return model.parts_of(groups);
}
inline std::unique_ptr<Stepper> make_stepper(const ShardedModel* model, torch::optim::Optimizer& optimizer,
                                             const StepKind& kind, const ZeroRedundancyOptions& options) {
  return model->make_stepper(optimizer, kind, options);
}

}  // namespace lockstep::detail
