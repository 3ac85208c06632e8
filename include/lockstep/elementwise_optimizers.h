#pragma once

#include <lockstep/cxx20.h>

#include <concepts>
#include <type_traits>

#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

namespace lockstep::detail {

/// Optimizers that update each element independently. LBFGS does not.
template <typename Optimizer>
concept Elementwise =
    std::derived_from<Optimizer, torch::optim::Optimizer> && !std::derived_from<Optimizer, torch::optim::LBFGS>;

/// The kernels that step an optimizer. A class derived from one of these may do anything, so it keeps its own step().
enum class FormulaKind { kNone, kSgd, kAdam, kAdamW };
template <typename Optimizer>
constexpr FormulaKind formula_kind() {
  if (std::is_same_v<Optimizer, torch::optim::SGD>) return FormulaKind::kSgd;
  if (std::is_same_v<Optimizer, torch::optim::Adam>) return FormulaKind::kAdam;
  if (std::is_same_v<Optimizer, torch::optim::AdamW>) return FormulaKind::kAdamW;
  return FormulaKind::kNone;
}

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

/// Whether the layout of the optimizer's state is known. A class derived from one of these may have any state.
template <typename Optimizer>
constexpr bool state_is_known() {
  return formula_kind<Optimizer>() != FormulaKind::kNone || std::is_same_v<Optimizer, torch::optim::RMSprop> ||
         std::is_same_v<Optimizer, torch::optim::Adagrad>;
}

}  // namespace lockstep::detail
