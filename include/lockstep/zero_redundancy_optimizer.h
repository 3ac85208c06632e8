#pragma once

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <lockstep/elementwise_optimizers.h>
#include <lockstep/group_options.h>
#include <lockstep/master_weights.h>
#include <lockstep/replica.h>
#include <lockstep/sharded_model.h>
#include <lockstep/stepper.h>

namespace lockstep {

struct ZeroRedundancyOptions {
  /// For a model of several ranks: parameters exist once on each machine, in memory that all of its ranks map, so a
  /// rank's writes to them are visible to all. False: each rank has its own copy.
  bool shared_parameters = false;
  /// Also keep float16 and bfloat16 parameters and their state in float, so that steps smaller than a parameter's last
  /// bit add up. The optimizer steps the float copy; the parameter is the copy, rounded.
  bool master_weights = false;
  /// For the parts of a FullyShardedDataParallel: a folder on a local disk. The optimizer's state then lies in files
  /// there, which the kernel writes out and reads back when memory is short. They have no names and go with the
  /// process. The constructor throws Error on all ranks if some cannot make files there. The space is taken in the
  /// first step, which throws Error on all ranks if there is too little on some. Empty: the state lies in memory.
  /// Machines may give different folders.
  std::string state_folder = {};
};

namespace detail {

/// TORCH_CHECK fails for parameters and options that the optimizer cannot step.
void check_parameters(const torch::optim::Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options);
/// Runs own_step(), LibTorch's, on the masters of 16-bit parameters. The parameters are then the masters, rounded.
void step_on_masters(torch::optim::Optimizer& optimizer, FormulaKind kind, const std::function<void()>& own_step);
std::vector<at::Tensor> trained_parameters(const Replica& model);

/// The ranks of `model` step together; null: the optimizer is one process's. Returns null if the optimizer's own step()
/// suffices.
/// REQUIRES: every rank of `model` calls it.
std::unique_ptr<Stepper> make_stepper(const Replica* model, torch::optim::Optimizer& optimizer, const StepKind& kind,
                                      const ZeroRedundancyOptions& options);

}  // namespace detail

/// One of LibTorch's optimizers with one state for all ranks of a machine, or for a group whose ranks share no memory.
/// Each rank steps its part:
///
///     lockstep::DistributedDataParallel model(net, context);
///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
///
/// or alone, for the parameters of one process. Steps are taken by kernels that read and write everything once: SGD,
/// Adam and AdamW, for parameters of float, double, float16 and bfloat16 on the CPU. Any other elementwise optimizer,
/// and all of them on a device, run their own step, on a rank's slices if there are several ranks; docs/optimizers.md
/// has the rules.
///
///     lockstep::ZeroRedundancyOptimizer optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
///
/// It is a subclass of LibTorch's optimizer: parameter groups, options, learning rates, state() and code that saves and
/// loads them work as before. The formulas are LibTorch's, operation by operation, without fused multiply-adds: every
/// processor gives the same bits, which differ from LibTorch's in the last place. 16-bit parameters are computed in
/// float and rounded once per step. Large parameters are stepped by the threads of at::set_num_threads().
///
/// Parameters are all on the CPU or all on one device (shared_parameters: the CPU). A step() that fails changes
/// nothing.
template <detail::Elementwise Optimizer>
class ZeroRedundancyOptimizer : public Optimizer,
                                public detail::KeepsMasters,
                                public detail::KeepsSlices,
                                public detail::AdoptsState {
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

 public:
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, OptimizerOptions defaults,
                          ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(Groups{std::move(parameters)}, std::move(defaults), options) {}
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Groups& groups, OptimizerOptions defaults, ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(static_cast<const Replica*>(nullptr), groups, std::move(defaults), options) {}
  /// Steps the parameters that `model` trains, together with the model's other ranks. Every rank must make it and call
  /// step(), with the same options and the same state; a difference is an Error on all ranks.
  /// REQUIRES: `model` outlives it.
  ///
  /// With kernels, step() instead of backward takes the mean (or sum) over the ranks: until then .grad is this rank's
  /// own gradient. Limit its norm by model.clip_grad_norm(), which every rank must then call and which leaves no .grad.
  /// Errors and skipped steps of a reduction (NonFinitePolicy, skip_step()) come from step(). While `model` has a
  /// communication hook, and if several machines have several ranks, backward reduces gradients as without this
  /// optimizer.
  ///
  /// The parameters move into memory that the ranks of the machine share, and back when this object is destroyed. The
  /// tensors stay the same objects, but their views and earlier results of .data() show the old memory. If ranks share
  /// no memory, every rank must call the functions that save the state.
  template <detail::OfRanks Model, typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Model& model, OptimizerOptions defaults, ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(&model, Groups{detail::trained_parameters(model)}, std::move(defaults), options) {}
  /// With groups that have their own options and together hold all parameters that `model` trains.
  template <detail::OfRanks Model, typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Model& model, const Groups& groups, OptimizerOptions defaults,
                          ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(&model, detail::groups_in(model, groups), std::move(defaults), options) {}

  ZeroRedundancyOptimizer(ZeroRedundancyOptimizer&& other) noexcept
      : Optimizer(std::move(other)),
        options_(other.options_),
        stepper_(std::move(other.stepper_)),
        moved_from_(std::exchange(other.moved_from_, true)) {
    if (stepper_) stepper_->move_to(*this);
  }

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    TORCH_CHECK(!moved_from_,
                "ZeroRedundancyOptimizer::step(): it was moved from; use the object that it was moved to");
    if (!stepper_) return Optimizer::step(std::move(closure));
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    stepper_->step();
    return loss;
  }

  void save(torch::serialize::OutputArchive& archive) const override {
    complete_state();
    Optimizer::save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override {
    check_state_is_known();
    Optimizer::load(archive);
  }
  bool keeps_masters() const override { return options_.master_weights; }
  void check_state_is_known() const override {
    if (stepper_) stepper_->check_state_is_known();
  }
  void complete_state() const override {
    if (stepper_) stepper_->complete_state();
  }
  const Group* slice_holders() const override { return stepper_ ? stepper_->slice_holders() : nullptr; }
  bool is_never_whole() const override { return stepper_ && stepper_->is_never_whole(); }
  void show_slices() const override {
    if (stepper_) stepper_->show_slices();
  }
  at::IntArrayRef sizes_of(const at::Tensor& parameter) const override {
    return stepper_ ? stepper_->sizes_of(parameter) : parameter.sizes();
  }
  std::pair<int64_t, int64_t> elements_to_load(const at::Tensor& parameter, const at::Tensor& value) const override {
    return stepper_ ? stepper_->elements_to_load(parameter, value) : std::pair<int64_t, int64_t>{0, value.numel()};
  }
  bool adopts_state() const override { return stepper_ && stepper_->adopts_state(); }

 private:
  static constexpr detail::FormulaKind kKind = detail::formula_kind<Optimizer>();

  template <typename Model, typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Model* model, const Groups& groups, OptimizerOptions defaults,
                          ZeroRedundancyOptions options)
      : Optimizer(detail::checked_groups<Optimizer>(groups, defaults), std::move(defaults)), options_(options) {
    detail::check_group_options(groups, this->defaults(), typeid(Optimizer));
    detail::check_parameters(*this, kKind, options_);
    const auto own_step = [](torch::optim::Optimizer& optimizer) {
      static_cast<ZeroRedundancyOptimizer&>(optimizer).own_step();
    };
    stepper_ = detail::make_stepper(model, *this, {kKind, detail::state_is_known<Optimizer>(), own_step}, options_);
  }

  void own_step() {
    const auto step = [this] { Optimizer::step(nullptr); };
    options_.master_weights ? detail::step_on_masters(*this, kKind, step) : step();
  }

  ZeroRedundancyOptions options_;
  std::unique_ptr<detail::Stepper> stepper_;
  bool moved_from_ = false;
};

template <typename Parameters, typename OptimizerOptions>
ZeroRedundancyOptimizer(const Parameters&, OptimizerOptions, ZeroRedundancyOptions = {})
    -> ZeroRedundancyOptimizer<typename detail::OptimizerOf<OptimizerOptions>::type>;
template <typename Model, typename OptimizerOptions>
ZeroRedundancyOptimizer(const Model&, const std::vector<torch::optim::OptimizerParamGroup>&, OptimizerOptions,
                        ZeroRedundancyOptions = {})
    -> ZeroRedundancyOptimizer<typename detail::OptimizerOf<OptimizerOptions>::type>;

}  // namespace lockstep
