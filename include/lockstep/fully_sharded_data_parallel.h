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

/// What a rank holds and has sent.
struct FullyShardedStats {
  int64_t parameter_bytes = 0;  ///< of the whole model
  int64_t part_bytes = 0;       ///< of parameters: this rank's own
  int64_t gathered_bytes = 0;   ///< once for all ranks of the machine: units in use, and what stays gathered
  int64_t gathers = 0;          ///< of a unit from other machines, so far
  int64_t sent_bytes = 0;       ///< by this rank to other machines, so far
};

/// The same on all ranks.
struct FullyShardedOptions {
  /// Units stay gathered from forward to the step, so that backward gathers nothing: a third fewer bytes between
  /// machines, as many as data parallel ranks send, for memory of all parameters once on each machine.
  bool keep_gathered = false;
  /// How many units are on their way while one is in use, from 0 to 8. Each needs memory for the largest unit, once on
  /// each machine, unless units stay gathered.
  int prefetch = 1;
};

/// FullyShardedDataParallel without the type of the module. Call methods on the thread that made the object, between
/// backward passes. Every rank calls each of them.
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

  /// Scales all gradients so that their norm, as one vector, is at most `max_norm`; returns the norm before. The same
  /// bits as Replica::clip_grad_norm with a ZeroRedundancyOptimizer. Call it after backward, before step().
  double clip_grad_norm(double max_norm, double norm_type = 2);

  /// The parameters under their names in the module, gathered unit by unit: on rank 0 all, on the other ranks none.
  [[nodiscard]] StateDict state_dict();
  /// lockstep::hash() of that, on every rank; no rank ever holds the whole.
  [[nodiscard]] std::string hash();
  /// Takes over such a state, given to every rank. Names, shapes and dtypes must be the model's. Reads one unit after
  /// the other, so tensors of a file that load_object() has mapped are never all in memory.
  void load_state_dict(const StateDict& state) override;
  /// For a Checkpointer, which saves the parameters piece by piece: checkpointer.add("model", model).
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
/// ranks: each rank has its part of every unit, a layer made as ShardedUnit. A unit's parameters are gathered from the
/// other machines before they are used, in forward and in backward, into memory that a machine's ranks share, and are
/// given up after that (FullyShardedOptions). What is in no unit stays gathered. docs/large_models.md says what that
/// costs.
///
///     Gpt net(options);                                              // with layers made as
///     lockstep::ShardedUnit<Layer> lockstep::FullyShardedDataParallel model(net, context);
///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
///
/// On every rank: the same module and the same order of units in each forward and backward; a difference is an Error on
/// all ranks that meet it. Each unit is called once in a forward that a backward follows. Gradients are the mean over
/// the ranks, and lie in the parts that the optimizer steps: a parameter's own .grad throws when it is read or written,
/// and removing it, as the module's zero_grad() does, clears the part's. Several backward passes before a step add up.
/// Reading a parameter of a unit outside of that unit's forward throws, unless all ranks are on one machine, where
/// nothing is ever given up.
///
/// It refuses, by name: buffers, parameters of 16 bits, on devices or shared between units, units within units or of
/// several dtypes, virtual ranks, activation checkpointing of a unit, and machines whose numbers of ranks differ or are
/// no powers of two. When this object goes, the parameters of units are lost on several machines; save before.
template <typename Module>
class FullyShardedDataParallel : public FullySharded {
  static_assert(!detail::ModuleOnStack<Module>, LOCKSTEP_MODULE_ON_STACK);

 public:
  FullyShardedDataParallel(Module module, const Context& context, const FullyShardedOptions& options = {})
      : FullyShardedDataParallel(std::move(module), context.group(), options) {}
  FullyShardedDataParallel(Module module, const Group& group, const FullyShardedOptions& options = {})
      : FullySharded(detail::pointer_of(module), group, options), module_(std::move(module)) {}

  /// The module's forward.
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
