#include "train/used_gradients.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include "base/weights_set.h"
#include "reducer/gradient_marks.h"
#include "train/optimizer_tensors.h"

namespace lockstep {
namespace {

/// The number of an optimizer's parameters that are checked, and of elements of each.
constexpr int64_t kMostParameters = 8, kMostElements = 8;

/// The part of LibTorch's state that each step of its optimizers changes.
at::Tensor state_of(const torch::optim::OptimizerParamState& state) {
  using namespace torch::optim;  // NOLINT
  if (const auto* sgd = dynamic_cast<const SGDParamState*>(&state)) return sgd->momentum_buffer();
  if (const auto* adam = dynamic_cast<const AdamParamState*>(&state)) return adam->exp_avg_sq();
  if (const auto* adamw = dynamic_cast<const AdamWParamState*>(&state)) return adamw->exp_avg_sq();
  if (const auto* rmsprop = dynamic_cast<const RMSpropParamState*>(&state)) return rmsprop->square_avg();
  if (const auto* adagrad = dynamic_cast<const AdagradParamState*>(&state)) return adagrad->sum();
  return {};
}

bool is_readable(const at::Tensor& tensor) {
  return tensor.defined() && tensor.is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         (tensor.scalar_type() == at::kFloat || tensor.scalar_type() == at::kDouble) && !tensor._is_zerotensor();
}

double element(const at::Tensor& tensor, int64_t at) {
  return tensor.scalar_type() == at::kFloat ? static_cast<double>(tensor.const_data_ptr<float>()[at])
                                            : tensor.const_data_ptr<double>()[at];
}

/// The index of the largest among some elements.
int64_t place_of_large(const at::Tensor& gradient) {
  const int64_t all = gradient.numel(), apart = std::max<int64_t>(1, all / kMostElements);
  int64_t best = 0;
  for (int64_t at = 0; at < all; at += apart)
    if (std::abs(element(gradient, at)) > std::abs(element(gradient, best))) best = at;
  return best;
}

bool is_finite(const at::Tensor& tensor) { return at::isfinite(tensor).all().item<bool>(); }

}  // namespace

UsedGradients::Step UsedGradients::step_of(torch::optim::Optimizer& optimizer) {
  Step step{};
  step.weights_set = times_weights_were_set();
  for (const auto& group : optimizer.param_groups()) {
    const auto* sgd = dynamic_cast<const torch::optim::SGDOptions*>(&group.options());
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) step.state = state_of(*found->second);
      if (step.state.defined()) {
        step.parameter = parameter;
        step.mark = mark_of(step.state);
        step.mark_of_parameter = mark_of(parameter);
        return step;
      }
      const at::Tensor& gradient = parameter.grad();
      if (sgd == nullptr || !is_readable(parameter) || !is_readable(gradient) || gradient.numel() == 0 ||
          gradient.scalar_type() != parameter.scalar_type())
        continue;
      const int64_t at = place_of_large(gradient);
      const double value = element(parameter, at), slope = element(gradient, at);
      if (slope == 0 || !std::isfinite(slope) || !std::isfinite(value)) continue;
      step.points.push_back({parameter, at, value, slope + sgd->weight_decay() * value});
      step.rate = sgd->lr();
      if (step.points.size() == static_cast<size_t>(kMostParameters)) return step;
    }
  }
  return step;
}

bool UsedGradients::moved_along(const Step& step) {
  const auto largest = std::max_element(
      step.points.begin(), step.points.end(),
      [](const Point& one, const Point& other) { return std::abs(one.direction) < std::abs(other.direction); });
  if (largest == step.points.end()) return false;
  const auto delta = [](const Point& point) { return element(point.parameter, point.at) - point.value; };
  const auto rounding = [&](const Point& point) {
    const bool is_float = point.parameter.scalar_type() == at::kFloat;
    const double epsilon = is_float ? std::numeric_limits<float>::epsilon() : std::numeric_limits<double>::epsilon();
    return 4 * epsilon * (std::abs(point.value) + std::abs(delta(point)));
  };
  const double rate = -delta(*largest) / largest->direction, error = rounding(*largest) / std::abs(largest->direction);
  if (!(rate > 2 * error)) return false;  // with less, its move would not be visible
  size_t moved = 0;
  for (const Point& point : step.points) {
    const double expected = -rate * point.direction;
    if (std::abs(delta(point) - expected) > 2 * (rounding(point) + error * std::abs(point.direction))) return false;
    if (std::abs(expected) > 8 * rounding(point)) ++moved;
  }
  return moved > 1 || std::abs(rate - step.rate) < 2 * error;
}

bool UsedGradients::is_repeated(const Step& step) {
  if (step.weights_set != times_weights_were_set()) return false;
  if (!step.state.defined()) return moved_along(step);
  return mark_of(step.state) != step.mark && mark_of(step.parameter) != step.mark_of_parameter;
}

bool UsedGradients::any_is_repeated() const {
  return std::any_of(steps_.begin(), steps_.end(), [](const auto& entry) { return is_repeated(entry.second); });
}

void UsedGradients::stepped(torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    if (!group.params().empty()) {
      steps_[group.params().front().unsafeGetTensorImpl()] = step_of(optimizer);
      return;
    }
}

void UsedGradients::found_infinity(const std::vector<at::Tensor>& parameters) {
  std::copy_if(parameters.begin(), parameters.end(), std::back_inserter(finite_), is_finite);
}

void UsedGradients::replaced(const std::vector<at::Tensor>& parameters) {
  if (finite_.empty()) return;
  const TensorSet set = set_of(parameters);
  std::erase_if(finite_, [&](const at::Tensor& parameter) { return set.contains(parameter.unsafeGetTensorImpl()); });
}

std::string UsedGradients::trouble() const {
  if (!std::all_of(finite_.begin(), finite_.end(), is_finite))
    return "stepped an optimizer with gradients in which the scaler had found infinity or NaN, which are in its "
           "parameters now; call only scaler.step(optimizer), which leaves out such a step";
  if (repeated_ || any_is_repeated())
    return "stepped an optimizer again after the scaler's step() had used its gradients, as optimizer.step() does; "
           "call "
           "only scaler.step(optimizer)";
  return "";
}

void UsedGradients::clear() {
  steps_.clear();
  finite_.clear();
  repeated_ = false;
}

}  // namespace lockstep
