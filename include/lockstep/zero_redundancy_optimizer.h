#pragma once

#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include <lockstep/elementwise_optimizers.h>
#include <lockstep/group_options.h>
#include <lockstep/master_weights.h>
#include <lockstep/replica.h>

namespace lockstep {

struct ZeroRedundancyOptions {
  /// For a model of several ranks: parameters lie once on each machine, in memory that all of its ranks map, so what
  /// one rank writes into them is everybody's there. false: each rank has its own copy.
  bool shared_parameters = false;
  /// Keep float16 and bfloat16 parameters and their state in float as well, so that steps smaller than a parameter's
  /// last bit add up. The float copy is what the optimizer steps; the parameter is that rounded.
  bool master_weights = false;
};

namespace detail {

/// TORCH_CHECK fails for parameters and options that cannot be stepped.
void check_parameters(const torch::optim::Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options);
/// False: there are no kernels for where the parameters are, so nothing was done and the optimizer's own step() has to.
bool fused_step(torch::optim::Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options);
/// own_step(), which is LibTorch's, on the masters of 16-bit parameters; these then are the masters rounded.
void step_on_masters(torch::optim::Optimizer& optimizer, FormulaKind kind, const std::function<void()>& own_step);
std::vector<at::Tensor> trained_parameters(const Replica& model);

class SliceStep;
struct DeleteSliceStep {
  void operator()(SliceStep* step) const;
};
using SliceStepPtr = std::unique_ptr<SliceStep, DeleteSliceStep>;
/// Null in a world of one, and where there are kernels (ShardedStep).
SliceStepPtr step_by_slices(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind,
                            bool state_is_known, const ZeroRedundancyOptions& options);
void step(SliceStep& slices, const std::function<void()>& own_step);
void check_state_is_known(const SliceStep& slices);
void complete_state(SliceStep& slices);
const Group* slice_holders(const SliceStep& slices);
void move_to(SliceStep& slices, torch::optim::Optimizer& optimizer);

class ShardedStep;
struct DeleteShardedStep {
  void operator()(ShardedStep* step) const;
};
using ShardedStepPtr = std::unique_ptr<ShardedStep, DeleteShardedStep>;
/// What an optimizer's class does in step(), whatever a class derived from it does.
using StepOfItself = void (*)(torch::optim::Optimizer& optimizer);
/// Null in a world of one.
ShardedStepPtr shard(const Replica& model, torch::optim::Optimizer& optimizer, FormulaKind kind,
                     const ZeroRedundancyOptions& options, StepOfItself own_step);
void step(ShardedStep& sharded);
void complete_state(ShardedStep& sharded);
const Group* slice_holders(const ShardedStep& sharded);
void move_to(ShardedStep& sharded, torch::optim::Optimizer& optimizer);

}  // namespace detail

/// One of LibTorch's optimizers with one state for all ranks of a machine, or of a group whose ranks share no memory,
/// of which each rank steps its part:
///
///     lockstep::DistributedDataParallel model(net, context);
///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
///
/// or alone, for the parameters of one process. Steps are taken by kernels that read and write everything once: SGD,
/// Adam and AdamW, for parameters of float, double, float16 and bfloat16 on the CPU. Any other elementwise optimizer,
/// and each of them on a device, steps as it does by itself, on the slices of a rank where there are several;
/// docs/optimizers.md says what it may do.
///
///     lockstep::ZeroRedundancyOptimizer optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
///
/// It is that optimizer to whoever asks: parameter groups, options, learning rates, state() and what saves and loads
/// them work as they do there. The formulas are LibTorch's, operation by operation, without fused multiply-adds: the
/// same bits on every processor, which differ from LibTorch's in the last place. 16-bit parameters are computed with in
/// float and rounded once a step. Large parameters are stepped by the threads of at::set_num_threads().
///
/// Parameters are all on the CPU or all on one device (shared_parameters: the CPU). A step() that fails changes nothing.
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
      : Optimizer(detail::checked_groups<Optimizer>(groups, defaults), std::move(defaults)), options_(options) {
    detail::check_group_options(groups, this->defaults(), typeid(Optimizer));
    detail::check_parameters(*this, kKind, options_);
  }
  /// Steps what `model` trains, together with its other ranks. Every rank makes it and calls
  /// step(), with the same options and the same state; what differs is an Error on all ranks. `model` outlives it.
  ///
  /// Where there are kernels, step() from now on takes the mean (or sum) over the ranks, not backward: until then .grad
  /// is what this rank has computed itself. Limit its norm by model.clip_grad_norm(), which every rank then calls and
  /// which leaves no .grad. Errors and skipped steps of a reduction (NonFinitePolicy, skip_step()) come with step().
  /// While `model` has a communication hook, and where several machines have several ranks, backward reduces gradients
  /// as ever.
  ///
  /// The parameters move into other memory, that the ranks of the machine reach, and back when this object goes: the
  /// tensors stay the same, but views of them and what .data() gave before show the old memory. Where ranks share no
  /// memory, every rank calls whatever saves the state.
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Replica& model, OptimizerOptions defaults, ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(model, Groups{detail::trained_parameters(model)}, std::move(defaults), options) {}
  /// With groups of their own options, which together hold what `model` trains.
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Replica& model, const Groups& groups, OptimizerOptions defaults,
                          ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(groups, std::move(defaults), options) {
    slices_ = detail::step_by_slices(model, *this, kKind, detail::state_is_known<Optimizer>(), options_);
    if (!slices_)
      sharded_ = detail::shard(model, *this, kKind, options_, [](torch::optim::Optimizer& optimizer) {
        static_cast<ZeroRedundancyOptimizer&>(optimizer).own_step();
      });
  }

  ZeroRedundancyOptimizer(ZeroRedundancyOptimizer&& other) noexcept
      : Optimizer(std::move(other)),
        options_(other.options_),
        sharded_(std::move(other.sharded_)),
        slices_(std::move(other.slices_)),
        moved_from_(std::exchange(other.moved_from_, true)) {
    if (sharded_) detail::move_to(*sharded_, *this);
    if (slices_) detail::move_to(*slices_, *this);
  }

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    TORCH_CHECK(!moved_from_, "ZeroRedundancyOptimizer::step(): it was moved from; step the one that it became");
    if (kKind == detail::FormulaKind::kNone && !slices_) return Optimizer::step(std::move(closure));
    at::Tensor loss;
    if (closure) {
      const at::AutoGradMode enable_grad(true);
      loss = closure();
    }
    if (slices_)
      detail::step(*slices_, [this] { own_step(); });
    else if (sharded_)
      detail::step(*sharded_);
    else if (!detail::fused_step(*this, kKind, options_))
      own_step();
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
    if (slices_) detail::check_state_is_known(*slices_);
  }
  void complete_state() const override {
    if (slices_) detail::complete_state(*slices_);
    if (sharded_) detail::complete_state(*sharded_);
  }
  const Group* slice_holders() const override {
    if (slices_) return detail::slice_holders(*slices_);
    return sharded_ ? detail::slice_holders(*sharded_) : nullptr;
  }
  bool adopts_state() const override { return sharded_ != nullptr; }

 private:
  static constexpr detail::FormulaKind kKind = detail::formula_kind<Optimizer>();

  void own_step() {
    const auto step = [this] { Optimizer::step(nullptr); };
    options_.master_weights ? detail::step_on_masters(*this, kKind, step) : step();
  }

  ZeroRedundancyOptions options_;
  detail::ShardedStepPtr sharded_;
  detail::SliceStepPtr slices_;
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
