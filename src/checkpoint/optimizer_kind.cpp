#include "checkpoint/optimizer_kind.h"

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <lockstep/error.h>
#include <lockstep/master_weights.h>

#include "checkpoint/master_state.h"

// One table for each optimizer: the state of a parameter and the options of a group, under PyTorch's names.

namespace lockstep {

double number_of(const c10::IValue& value) {
  if (value.isDouble()) return value.toDouble();
  if (value.isInt()) return static_cast<double>(value.toInt());
  if (value.isTensor() && value.toTensor().numel() == 1) return value.toTensor().item<double>();
  throw Error(std::string("is a ") + value.tagKind().c_str() + ", not a number");
}

namespace {

using Field = OptimizerField;
using Option = OptimizerOption;
using Kind = OptimizerKind;

template <typename Options>
Option real_option(const char* name, double& (Options::*mutable_access)() noexcept,
                   const double& (Options::*access)() const noexcept) {
  return {name, [=](const OptimizerOptions& options) { return (static_cast<const Options&>(options).*access)(); },
          [=](OptimizerOptions& options, const c10::IValue& value) {
            (static_cast<Options&>(options).*mutable_access)() = number_of(value);
          }};
}

template <typename Options>
Option bool_option(const char* name, bool& (Options::*mutable_access)() noexcept,
                   const bool& (Options::*access)() const noexcept) {
  return {name, [=](const OptimizerOptions& options) { return (static_cast<const Options&>(options).*access)(); },
          [=](OptimizerOptions& options, const c10::IValue& value) {
            if (!value.isBool()) throw Error(std::string("is a ") + value.tagKind().c_str() + ", not True or False");
            (static_cast<Options&>(options).*mutable_access)() = value.toBool();
          }};
}

// LibTorch overloads the accessors of an option; these select one.
#define LOCKSTEP_REAL(Options, name) real_option<Options>(#name, &Options::name, &Options::name)
#define LOCKSTEP_BOOL(Options, name) bool_option<Options>(#name, &Options::name, &Options::name)

template <typename Options>
Option betas_option() {
  return {"betas",
          [](const OptimizerOptions& options) {
            const auto [first, second] = static_cast<const Options&>(options).betas();
            return c10::ivalue::Tuple::create({first, second});
          },
          [](OptimizerOptions& options, const c10::IValue& value) {
            std::vector<c10::IValue> items;
            if (value.isTuple()) items = value.toTupleRef().elements().vec();
            if (value.isList()) items = value.toList().vec();
            if (items.size() != 2) throw Error("is not a pair of numbers");
            static_cast<Options&>(options).betas(std::make_tuple(number_of(items[0]), number_of(items[1])));
          }};
}

template <typename State>
Field tensor_field(const char* name, at::Tensor& (State::*mutable_access)()) {
  return {name, [=](OptimizerParamState& state) { return (static_cast<State&>(state).*mutable_access)(); },
          [=](OptimizerParamState& state, const at::Tensor& value) {
            (static_cast<State&>(state).*mutable_access)() = value;
          }};
}

/// Python stores the step as a float32 scalar.
template <typename State>
Field step_field() {
  Field field{
      "step",
      [](OptimizerParamState& state) { return at::scalar_tensor(static_cast<State&>(state).step(), at::kFloat); },
      [](OptimizerParamState& state, const at::Tensor& value) {
        static_cast<State&>(state).step(static_cast<int64_t>(value.item<double>()));
      }};
  field.is_scalar = true;
  return field;
}

/// Options that only Python's optimizers have. Only `maximize` changes the effect of a step.
std::vector<std::pair<const char*, c10::IValue>> fixed_options(bool capturable) {
  std::vector<std::pair<const char*, c10::IValue>> options = {
      {"maximize", false}, {"foreach", {}}, {"differentiable", false}, {"fused", {}}};
  if (capturable) options.emplace_back("capturable", false);
  return options;
}

/// The state of Adam and AdamW. LibTorch overloads the accessors, hence the casts.
template <typename State, typename Options>
Kind adam_kind(bool decoupled) {
  using Access = at::Tensor& (State::*)();
  Field greatest = tensor_field("max_exp_avg_sq", static_cast<Access>(&State::max_exp_avg_sq));
  greatest.needed = [](const OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options()).amsgrad();
  };
  Kind kind{.fields = {step_field<State>(), tensor_field("exp_avg", static_cast<Access>(&State::exp_avg)),
                       tensor_field("exp_avg_sq", static_cast<Access>(&State::exp_avg_sq)), greatest},
            .options = {LOCKSTEP_REAL(Options, lr), betas_option<Options>(), LOCKSTEP_REAL(Options, eps),
                        LOCKSTEP_REAL(Options, weight_decay), LOCKSTEP_BOOL(Options, amsgrad)},
            .fixed = fixed_options(/*capturable=*/true),
            .make = [] { return std::make_unique<State>(); }};
  kind.fixed.emplace_back("decoupled_weight_decay", decoupled);
  return kind;
}

Kind sgd_kind() {
  using State = torch::optim::SGDParamState;
  using Options = torch::optim::SGDOptions;
  using Access = at::Tensor& (State::*)();
  Field momentum = tensor_field("momentum_buffer", static_cast<Access>(&State::momentum_buffer));
  momentum.needed = [](const OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options()).momentum() != 0;
  };
  return {.fields = {momentum},
          .options = {LOCKSTEP_REAL(Options, lr), LOCKSTEP_REAL(Options, momentum), LOCKSTEP_REAL(Options, dampening),
                      LOCKSTEP_REAL(Options, weight_decay), LOCKSTEP_BOOL(Options, nesterov)},
          .fixed = fixed_options(/*capturable=*/false),
          .make = [] { return std::make_unique<State>(); }};
}

Kind rmsprop_kind() {
  using State = torch::optim::RMSpropParamState;
  using Options = torch::optim::RMSpropOptions;
  using Access = at::Tensor& (State::*)();
  Field momentum = tensor_field("momentum_buffer", static_cast<Access>(&State::momentum_buffer));
  momentum.needed = [](const OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options()).momentum() > 0;
  };
  Field mean = tensor_field("grad_avg", static_cast<Access>(&State::grad_avg));
  mean.needed = [](const OptimizerParamGroup& group) {
    return static_cast<const Options&>(group.options()).centered();
  };
  return {
      .fields = {step_field<State>(), tensor_field("square_avg", static_cast<Access>(&State::square_avg)), momentum,
                 mean},
      .options = {LOCKSTEP_REAL(Options, lr), LOCKSTEP_REAL(Options, momentum), LOCKSTEP_REAL(Options, alpha),
                  LOCKSTEP_REAL(Options, eps), LOCKSTEP_BOOL(Options, centered), LOCKSTEP_REAL(Options, weight_decay)},
      .fixed = fixed_options(/*capturable=*/true),
      .make = [] { return std::make_unique<State>(); }};
}

Kind adagrad_kind() {
  using State = torch::optim::AdagradParamState;
  using Options = torch::optim::AdagradOptions;
  using Access = at::Tensor& (State::*)();
  return {.fields = {step_field<State>(), tensor_field("sum", static_cast<Access>(&State::sum))},
          .options = {LOCKSTEP_REAL(Options, lr), LOCKSTEP_REAL(Options, lr_decay), LOCKSTEP_REAL(Options, eps),
                      LOCKSTEP_REAL(Options, weight_decay), LOCKSTEP_REAL(Options, initial_accumulator_value)},
          .fixed = fixed_options(/*capturable=*/false),
          .make = [] { return std::make_unique<State>(); },
          .remembers_from_start = true};
}

#undef LOCKSTEP_REAL
#undef LOCKSTEP_BOOL

/// `kind`, of a state type, extended by a float copy of 16-bit parameters. Apex and Transformer Engine use the same
/// name for the copy, and Python's load_state_dict() accepts unknown entries.
template <typename State>
Kind with_masters(Kind kind, const Optimizer& optimizer) {
  const auto* keeper = dynamic_cast<const detail::KeepsMasters*>(&optimizer);
  if (keeper == nullptr || !keeper->keeps_masters()) return kind;
  kind.masters = true;
  kind.make = [] { return std::make_unique<WithMaster<State>>(); };
  kind.fields.push_back({.name = "master_param",
                         .get =
                             [](OptimizerParamState& state) {
                               const auto* master = dynamic_cast<const Master*>(&state);
                               return master == nullptr ? at::Tensor() : master->master_param;
                             },
                         .set = [](OptimizerParamState& state,
                                   const at::Tensor& value) { dynamic_cast<Master&>(state).master_param = value; },
                         .needed = [](const auto&) { return false; }});
  return kind;
}

}  // namespace

OptimizerKind kind_of(const Optimizer& optimizer) {
  using namespace torch::optim;
  if (dynamic_cast<const SGD*>(&optimizer)) return with_masters<SGDParamState>(sgd_kind(), optimizer);
  if (dynamic_cast<const AdamW*>(&optimizer))
    return with_masters<AdamWParamState>(adam_kind<AdamWParamState, AdamWOptions>(/*decoupled=*/true), optimizer);
  if (dynamic_cast<const Adam*>(&optimizer))
    return with_masters<AdamParamState>(adam_kind<AdamParamState, AdamOptions>(/*decoupled=*/false), optimizer);
  if (dynamic_cast<const torch::optim::RMSprop*>(&optimizer)) return rmsprop_kind();
  if (dynamic_cast<const torch::optim::Adagrad*>(&optimizer)) return adagrad_kind();
  TORCH_CHECK(false,
              "Lockstep does not know the state of this optimizer; it knows SGD, Adam, AdamW, RMSprop and Adagrad");
}

}  // namespace lockstep
