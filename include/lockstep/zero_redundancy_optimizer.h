#pragma once

#include <concepts>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/master_weights.h>
#include <lockstep/replica.h>

namespace lockstep {

struct ZeroRedundancyOptions {
  /// For a model of several ranks: parameters lie once, in memory that all ranks map, so what one rank writes into them
  /// is everybody's. false: each rank has its own copy, and the rank that steps a slice writes it into all of them.
  bool shared_parameters = false;
  /// Keep float16 and bfloat16 parameters and their state in float as well, so that steps smaller than a parameter's
  /// last bit add up. The float copy is what the optimizer steps; the parameter is that rounded.
  bool master_weights = false;
};

namespace detail {

/// Optimizers that treat each element by itself. LBFGS looks at all of them together.
template <typename Optimizer>
concept Elementwise =
    std::derived_from<Optimizer, torch::optim::Optimizer> && !std::derived_from<Optimizer, torch::optim::LBFGS>;

/// Which kernels step it. A class derived from one of these may do anything, so it keeps its own step().
enum class FormulaKind { kNone, kSgd, kAdam, kAdamW };
template <typename Optimizer>
constexpr FormulaKind formula_kind() {
  if (std::is_same_v<Optimizer, torch::optim::SGD>) return FormulaKind::kSgd;
  if (std::is_same_v<Optimizer, torch::optim::Adam>) return FormulaKind::kAdam;
  if (std::is_same_v<Optimizer, torch::optim::AdamW>) return FormulaKind::kAdamW;
  return FormulaKind::kNone;
}

/// The optimizer that has these options.
template <typename Options>
struct OptimizerOf;
template <>
struct OptimizerOf<torch::optim::SGDOptions> : std::type_identity<torch::optim::SGD> {};
template <>
struct OptimizerOf<torch::optim::AdamOptions> : std::type_identity<torch::optim::Adam> {};
template <>
struct OptimizerOf<torch::optim::AdamWOptions> : std::type_identity<torch::optim::AdamW> {};
template <>
struct OptimizerOf<torch::optim::RMSpropOptions> : std::type_identity<torch::optim::RMSprop> {};
template <>
struct OptimizerOf<torch::optim::AdagradOptions> : std::type_identity<torch::optim::Adagrad> {};

/// TORCH_CHECK fails for parameters and options that the kernels do not step.
void check_parameters(const torch::optim::Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options);
void fused_step(torch::optim::Optimizer& optimizer, FormulaKind kind, const ZeroRedundancyOptions& options);
std::vector<at::Tensor> trained_parameters(const Replica& model);

class ShardedStep;
struct DeleteShardedStep {
  void operator()(ShardedStep* step) const;
};
using ShardedStepPtr = std::unique_ptr<ShardedStep, DeleteShardedStep>;
/// Null in a world of one.
ShardedStepPtr shard(const Replica& model, const torch::optim::Optimizer& optimizer, FormulaKind kind,
                     const ZeroRedundancyOptions& options);
void step(ShardedStep& sharded, torch::optim::Optimizer& optimizer);

}  // namespace detail

/// One of LibTorch's optimizers with one state for all ranks of a machine, of which each rank steps its part:
///
///     lockstep::DistributedDataParallel model(net, context);
///     lockstep::ZeroRedundancyOptimizer optimizer(model, torch::optim::AdamWOptions(1e-3));
///
/// or alone, for the parameters of one process. Steps are taken by kernels that read and write everything once: SGD,
/// Adam and AdamW, for parameters of float, double, float16 and bfloat16 on the CPU. Any other elementwise optimizer
/// steps as it does by itself.
///
///     lockstep::ZeroRedundancyOptimizer optimizer(net->parameters(), torch::optim::AdamWOptions(1e-3));
///
/// It is that optimizer to whoever asks: parameter groups, options, learning rates, state() and what saves and loads
/// them work as they do there. The formulas are LibTorch's, operation by operation, without fused multiply-adds: the
/// same bits on every processor, which differ from LibTorch's in the last place. 16-bit parameters are computed with in
/// float and rounded once a step. Large parameters are stepped by the threads of at::set_num_threads().
///
/// step() changes nothing if it fails: a sparse gradient, a parameter that was moved to another device.
template <detail::Elementwise Optimizer>
class ZeroRedundancyOptimizer : public Optimizer, public detail::KeepsMasters {
  using Groups = std::vector<torch::optim::OptimizerParamGroup>;

 public:
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(std::vector<at::Tensor> parameters, OptimizerOptions defaults,
                          ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(Groups{std::move(parameters)}, std::move(defaults), options) {}
  /// With groups of their own options.
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Groups& groups, OptimizerOptions defaults, ZeroRedundancyOptions options = {})
      : Optimizer(groups, std::move(defaults)), options_(options) {
    detail::check_parameters(*this, kKind, options_);
  }
  /// Steps what `model` trains, together with its other ranks, which must share memory. Every rank makes it and calls
  /// step(), with the gradients that a backward has reduced, the same options and the same state; what differs is an
  /// Error on all ranks. `model` outlives it.
  ///
  /// The parameters move into memory that the other ranks reach and back when this object goes: the tensors stay the
  /// same, but views of them and what .data() gave before show the old memory.
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Replica& model, OptimizerOptions defaults, ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(model, Groups{detail::trained_parameters(model)}, std::move(defaults), options) {}
  /// With groups of their own options, which together hold what `model` trains.
  template <typename OptimizerOptions>
  ZeroRedundancyOptimizer(const Replica& model, const Groups& groups, OptimizerOptions defaults,
                          ZeroRedundancyOptions options = {})
      : ZeroRedundancyOptimizer(groups, std::move(defaults), options) {
    sharded_ = detail::shard(model, *this, kKind, options_);
  }

  at::Tensor step(torch::optim::Optimizer::LossClosure closure = nullptr) override {
    if constexpr (kKind == detail::FormulaKind::kNone) {
      return Optimizer::step(std::move(closure));
    } else {
      at::Tensor loss;
      if (closure) {
        const at::AutoGradMode enable_grad(true);
        loss = closure();
      }
      if (sharded_)
        detail::step(*sharded_, *this);
      else
        detail::fused_step(*this, kKind, options_);
      return loss;
    }
  }

  bool keeps_masters() const override { return options_.master_weights; }

 private:
  static constexpr detail::FormulaKind kKind = detail::formula_kind<Optimizer>();

  ZeroRedundancyOptions options_;
  detail::ShardedStepPtr sharded_;
};

template <typename Parameters, typename OptimizerOptions>
ZeroRedundancyOptimizer(const Parameters&, OptimizerOptions, ZeroRedundancyOptions = {})
    -> ZeroRedundancyOptimizer<typename detail::OptimizerOf<OptimizerOptions>::type>;
template <typename Model, typename OptimizerOptions>
ZeroRedundancyOptimizer(const Model&, const std::vector<torch::optim::OptimizerParamGroup>&, OptimizerOptions,
                        ZeroRedundancyOptions = {})
    -> ZeroRedundancyOptimizer<typename detail::OptimizerOf<OptimizerOptions>::type>;

}  // namespace lockstep
