#include "optim/formula.h"

#include "checkpoint/master_state.h"
#include "optim/kernels/step_constants.h"

namespace lockstep {
namespace {

using optim::Algorithm;
using optim::StepConstants;
using torch::optim::OptimizerOptions;
using torch::optim::OptimizerParamState;

template <typename State>
class FormulaOver : public Formula {
  std::unique_ptr<OptimizerParamState> new_state(bool with_master) const override {
    if (with_master) return std::make_unique<WithMaster<State>>();
    return std::make_unique<State>();
  }
  std::unique_ptr<OptimizerParamState> with_master(const OptimizerParamState& state) const override {
    auto result = std::make_unique<WithMaster<State>>();
    static_cast<State&>(*result) = static_cast<const State&>(state);
    return result;
  }
};

/// p -= lr * (g + weight_decay * p), with an optional momentum; Nesterov's looks ahead.
class SgdFormula final : public FormulaOver<torch::optim::SGDParamState> {
  using Options = torch::optim::SGDOptions;
  using State = torch::optim::SGDParamState;

  Algorithm algorithm(const OptimizerOptions& options) const override {
    const auto& sgd = static_cast<const Options&>(options);
    if (sgd.momentum() == 0) return Algorithm::kSgd;
    return sgd.nesterov() ? Algorithm::kSgdNesterov : Algorithm::kSgdMomentum;
  }
  at::Tensor array(const OptimizerParamState& state, int) const override {
    return static_cast<const State&>(state).momentum_buffer();
  }
  void set_array(OptimizerParamState& state, int, const at::Tensor& array) const override {
    static_cast<State&>(state).momentum_buffer(array);
  }
  StepConstants next(const OptimizerParamState* state, const OptimizerOptions& options) const override {
    const auto& sgd = static_cast<const Options&>(options);
    const bool first = state == nullptr || !array(*state, 0).defined();
    return optim::sgd_constants(
        {.lr = sgd.lr(), .momentum = sgd.momentum(), .dampening = sgd.dampening(), .weight_decay = sgd.weight_decay()},
        first);
  }
  void count(OptimizerParamState&) const override {}
};

/// Kingma and Ba, Adam (2015); Loshchilov and Hutter, AdamW (2019), which applies the decay to the parameter itself.
template <typename Options, typename State, bool decoupled>
class AdamFormula final : public FormulaOver<State> {
  Algorithm algorithm(const OptimizerOptions& options) const override {
    return static_cast<const Options&>(options).amsgrad() ? Algorithm::kAdamAmsgrad : Algorithm::kAdam;
  }
  at::Tensor array(const OptimizerParamState& state, int index) const override {
    const auto& adam = static_cast<const State&>(state);
    return index == 0 ? adam.exp_avg() : index == 1 ? adam.exp_avg_sq() : adam.max_exp_avg_sq();
  }
  void set_array(OptimizerParamState& state, int index, const at::Tensor& array) const override {
    auto& adam = static_cast<State&>(state);
    index == 0 ? adam.exp_avg(array) : index == 1 ? adam.exp_avg_sq(array) : adam.max_exp_avg_sq(array);
  }
  StepConstants next(const OptimizerParamState* state, const OptimizerOptions& options) const override {
    const auto& adam = static_cast<const Options&>(options);
    const auto [beta1, beta2] = adam.betas();
    const auto t = static_cast<double>(state == nullptr ? 1 : static_cast<const State&>(*state).step() + 1);
    return optim::adam_constants(
        {.lr = adam.lr(), .beta1 = beta1, .beta2 = beta2, .eps = adam.eps(), .weight_decay = adam.weight_decay()}, t,
        decoupled);
  }
  void count(OptimizerParamState& state) const override {
    auto& mine = static_cast<State&>(state);
    mine.step(mine.step() + 1);
  }
};

}  // namespace

const Formula& formula_of(detail::FormulaKind kind) {
  using namespace torch::optim;
  static const SgdFormula sgd;
  static const AdamFormula<AdamOptions, AdamParamState, /*decoupled=*/false> adam;
  static const AdamFormula<AdamWOptions, AdamWParamState, /*decoupled=*/true> adamw;
  switch (kind) {
    case detail::FormulaKind::kSgd:
      return sgd;
    case detail::FormulaKind::kAdam:
      return adam;
    case detail::FormulaKind::kAdamW:
      return adamw;
    case detail::FormulaKind::kNone:
      break;
  }
  TORCH_CHECK(false, "this optimizer has no kernels");
}

}  // namespace lockstep
