#pragma once

#include <lockstep/cxx20.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <lockstep/context.h>
#include <lockstep/module_on_stack.h>
#include <lockstep/sharded_model.h>
#include <lockstep/sharded_unit.h>
#include <lockstep/state_dict.h>
#include <lockstep/state_in_slices.h>

namespace lockstep {

/// The memory that a rank holds and the bytes that it has sent.
struct FullyShardedStats {
  int64_t parameter_bytes = 0;  ///< of the whole model
  int64_t part_bytes = 0;       ///< this rank's own part of the parameters
  int64_t gathered_bytes = 0;   ///< once for all ranks of the machine: units in use, and parameters that stay gathered
  int64_t gathers = 0;          ///< of a unit from other machines, so far
  int64_t sent_bytes = 0;       ///< by this rank to other machines, so far
};

/// Must be the same on all ranks.
struct FullyShardedOptions {
  /// Keep units gathered from forward to the step, so that backward gathers nothing. A third fewer bytes go between
  /// machines, as many as data parallel ranks send, but each machine needs memory for all parameters once.
  bool keep_gathered = false;
  /// The number of units being gathered while one is in use, from 0 to 8. Each needs memory for the largest unit, once
  /// on each machine, unless units stay gathered.
  int prefetch = 1;
};

/// FullyShardedDataParallel without the type of the module. Call methods on the thread that made the object, between
/// backward passes. Every rank must call each of them.
class FullySharded : public detail::ShardedModel, public detail::StateInSlices {
 public:
  FullySharded(std::shared_ptr<torch::nn::Module> module, const Group& group, const FullyShardedOptions& options);
  ~FullySharded() override;
  FullySharded(const FullySharded&) = delete;
  FullySharded& operator=(const FullySharded&) = delete;

  std::vector<at::Tensor> parts() const override;
  std::vector<torch::optim::OptimizerParamGroup> parts_of(
      const std::vector<torch::optim::OptimizerParamGroup>& groups) const override;
  std::unique_ptr<detail::Stepper> make_stepper(torch::optim::Optimizer& optimizer, const detail::StepKind& kind,
                                                const ZeroRedundancyOptions& options) const override;

  /// Scales all gradients so that their norm, as one vector, is at most `max_norm`; returns the norm before scaling.
  /// Gives the same bits as Replica::clip_grad_norm with a ZeroRedundancyOptimizer. Call it after backward, before
  /// step().
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// The parameters under their names in the module, gathered unit by unit: all of them on rank 0, none on other ranks.
  [[nodiscard]] StateDict state_dict();
  /// lockstep::hash() of state_dict(), on every rank. No rank ever holds the whole.
  [[nodiscard]] std::string hash();
  /// Loads such a state, given to every rank. Names, shapes and dtypes must be the model's. Reads one unit after the
  /// other, so tensors of a file that load_object() has mapped are never all in memory.
  void load_state_dict(const StateDict& state) override;
  /// For a Checkpointer, which saves the parameters piece by piece: checkpointer.add("model", model).
  const Group* slice_holders() const override;
  [[nodiscard]] StateDict state_in_slices() override;
  std::vector<detail::ElementRange> elements_to_load(const StateDict& state) const override;

  [[nodiscard]] FullyShardedStats stats() const;

 protected:
  /// Throws if a backward has failed or the group is gone.
  void before_forward() const;

 private:
  class State;
  const std::shared_ptr<State> state_;
};

/// Trains one model on all ranks of a group, and holds its parameters, gradients and optimizer state once over all
/// ranks. A unit is a layer made as ShardedUnit, and each rank has a part of every unit. Before a unit is used, in
/// forward and in backward, its parameters are gathered from the other machines into memory that a machine's ranks
/// share; afterwards they are released (FullyShardedOptions). Parameters in no unit stay gathered. docs/large_models.md
/// gives the costs.
///
///     Gpt net(options);                                  // its layers are lockstep::ShardedUnit<Layer>
///     lockstep::FullyShardedDataParallel model(net, context);
///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
///
/// REQUIRES: every rank has the same module and calls units in the same order in each forward and backward; a
/// difference is an Error on all ranks that meet it. A forward that a backward follows calls each unit once.
///
/// Gradients are the mean over the ranks, and lie in the parts that the optimizer steps. Reading or writing a
/// parameter's own .grad throws; removing it, as the module's zero_grad() does, clears the part's. Several backward
/// passes before a step add up. Reading a parameter of a unit outside the unit's forward throws, unless all ranks are
/// on one machine, where nothing is ever released.
///
/// Parameters are float, double, float16 or bfloat16; ZeroRedundancyOptions::master_weights keeps those of 16 bits in
/// float, too. Gradients of 16 bits are added in float and rounded once.
///
/// Not supported, and refused by name: buffers; parameters on devices or shared between units; units within units or of
/// several dtypes; virtual ranks; activation checkpointing of a unit; machines whose numbers of ranks differ or are not
/// powers of two. On several machines, destroying this object loses the parameters of units: save before.
template <typename Module>
class FullyShardedDataParallel : public FullySharded {
  static_assert(!detail::ModuleOnStack<Module>, LOCKSTEP_MODULE_ON_STACK);

 public:
  FullyShardedDataParallel(Module module, const Context& context, const FullyShardedOptions& options = {})
      : FullyShardedDataParallel(std::move(module), context.group(), options) {}
  FullyShardedDataParallel(Module module, const Group& group, const FullyShardedOptions& options = {})
      : FullySharded(detail::pointer_of(module), group, options), module_(std::move(module)) {}

  /// Calls the module's forward.
  template <typename... Arguments>
  auto operator()(Arguments&&... arguments) {
    before_forward();
    return module_->forward(std::forward<Arguments>(arguments)...);
  }
  auto operator->() const { return detail::pointer_of(module_); }
  const Module& module() const { return module_; }

 private:
  Module module_;
};

}  // namespace lockstep
