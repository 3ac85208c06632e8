#include <lockstep/grad_scaler.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_marks.h"

namespace lockstep {
namespace {

using Object = c10::impl::GenericDict;

/// A scale is a float.
void check_scale(const char* what, double scale) {
  const auto rounded = static_cast<float>(scale);
  TORCH_CHECK(std::isfinite(rounded) && rounded > 0, what, " is ", scale,
              "; it must be above 0 and within the range of float");
}

void check(const GradScalerOptions& options) {
  check_scale("GradScaler: init_scale", options.init_scale);
  TORCH_CHECK(options.growth_factor > 1 && options.backoff_factor > 0 && options.backoff_factor < 1 &&
                  options.growth_interval > 0,
              "GradScaler: growth_factor must be above 1, backoff_factor between 0 and 1, growth_interval above 0");
}

/// Gradients that one operation divides: of one device and dtype.
using GradientGroups = std::map<std::pair<at::ScalarType, std::string>, std::vector<at::Tensor>>;

GradientGroups gradients_of(torch::optim::Optimizer& optimizer) {
  GradientGroups groups;
  for (auto& group : optimizer.param_groups())
    for (at::Tensor& parameter : group.params()) {
      const at::Tensor& gradient = parameter.mutable_grad();
      if (!gradient.defined()) continue;
      TORCH_CHECK(gradient.scalar_type() != at::kHalf,
                  "GradScaler: a gradient is half; keep the parameters in float and use autocast()");
      TORCH_CHECK(gradient.layout() == at::kStrided, "GradScaler: sparse gradients cannot be unscaled");
      groups[{gradient.scalar_type(), gradient.device().str()}].push_back(gradient);
    }
  return groups;
}

double number(const Object& state, const char* name) {
  const auto found = state.find(std::string(name));
  if (found == state.end() || !(found->value().isDouble() || found->value().isInt()))
    throw Error("the state of the scaler has no number `" + std::string(name) + "`");
  return found->value().toScalar().toDouble();
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options) : options_(options), scale_(static_cast<float>(options.init_scale)) {
  check(options_);
}

GradScaler::GradScaler(const Group& group, GradScalerOptions options) : GradScaler(options) { group_ = group; }

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  scaled_ = true;
  return options_.enabled ? outputs * at::scalar_tensor(scale_, outputs.options().dtype(at::kFloat)) : outputs;
}

at::Tensor GradScaler::unscale_local(torch::optim::Optimizer& optimizer) const {
  at::NoGradGuard no_grad;
  at::Tensor result = at::zeros({2}, at::kFloat);
  // 1 / scale, rounded as in Python.
  const auto inverse = static_cast<float>(1 / static_cast<double>(scale_));
  for (const auto& [kind, gradients] : gradients_of(optimizer)) {
    const auto on_device = gradients.front().options().dtype(at::kFloat);
    at::Tensor found = at::zeros({1}, on_device);
    at::_amp_foreach_non_finite_check_and_unscale_(gradients, found, at::full({1}, inverse, on_device));
    result[0] = std::max(result[0].item<float>(), found.item<float>());
    result[1] = 1;
  }
  return result;
}

void GradScaler::refuse_unscaled(const Group& ranks, torch::optim::Optimizer& optimizer,
                                 std::optional<bool> contributed) const {
  // Gradients that no reducer follows may be zeros that a rank without a backward has kept.
  bool unscaled = !scaled_ && contributed.value_or(true);
  if (unscaled && !contributed) {
    unscaled = false;
    for (const auto& [kind, gradients] : gradients_of(optimizer))
      for (const at::Tensor& gradient : gradients) unscaled = unscaled || gradient.any().item<bool>();
  }
  const auto told = ranks.all_gather_bytes(unscaled ? "unscaled" : scaled_ ? "scaled" : "");
  if (std::find(told.begin(), told.end(), "unscaled") == told.end()) return;
  throw Error("GradScaler: " + ranks_with(told, std::string("unscaled")) +
              " ran backward without scale() since the last update(), and " + ranks_with(told, std::string("scaled")) +
              " with it, so the gradients have different scales. Call scaler.scale(loss).backward() on every rank; one "
              "without a batch calls skip_step() in place of its backward");
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto before = found_.find(&optimizer);
  TORCH_CHECK(before == found_.end(), "unscale(): the gradients of this optimizer ",
              before != found_.end() && before->second.stepped ? "were used by step() since the last update()"
                                                               : "were already unscaled since the last update()");
  TensorSet parameters;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) parameters.insert(parameter.unsafeGetTensorImpl());
  const at::Tensor found = unscale_local(optimizer);
  const OperationLabel label("the gradient scaler");
  if (const auto ranks = group_ ? group_ : ranks_that_reduce(parameters)) {
    // With the largest scale and the largest of their negatives: gradients divided by different numbers have no mean.
    // The last two: a rank has scaled its loss, and one with gradients of its own has not.
    const std::optional<bool> contributed = has_contributed(parameters);
    const bool unscaled = !scaled_ && contributed.value_or(found[1].item<float>() > 0);
    const at::Tensor said =
        at::cat({found, at::tensor({scale_, -scale_, scaled_ ? 1.0F : 0.0F, unscaled ? 1.0F : 0.0F})});
    ranks->all_reduce(said, ReduceOp::kMax);
    found.copy_(said.narrow(0, 0, 2));
    if (const auto largest = said[2].item<float>(), smallest = -said[3].item<float>(); largest != smallest)
      throw Error(c10::str("GradScaler: the ranks have different scales, from ", smallest, " to ", largest,
                           "; make it with the same options and load the same state on every rank, and give update() "
                           "the same new_scale"));
    if (said[4].item<float>() > 0 && said[5].item<float>() > 0) refuse_unscaled(*ranks, optimizer, contributed);
  }
  TORCH_CHECK(found[1].item<float>() > 0,
              "GradScaler: no parameter of the optimizer has a gradient; call backward() first. With "
              "set_non_finite_policy(NonFinitePolicy::kSkip) it is already gone: use either the scaler or the policy");
  accept_gradients(parameters);
  found_[&optimizer] = {.infinity = found[0].item<float>() > 0};
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!found_.contains(&optimizer)) unscale(optimizer);
  Found& found = found_.at(&optimizer);
  TORCH_CHECK(!found.stepped, "step(): already called for this optimizer since the last update()");
  found.stepped = true;
  if (!found.infinity) optimizer.step();
  return !found.infinity;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  TORCH_CHECK(!found_.empty(), "update(): there was no step() or unscale() since the last update()");
  const bool infinity =
      std::any_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.infinity; });
  found_.clear();
  scaled_ = false;
  if (new_scale) {
    check_scale("update(): new_scale", *new_scale);
    scale_ = static_cast<float>(*new_scale);
  } else if (infinity) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    growth_tracker_ = 0;
  }
}

c10::IValue GradScaler::state_dict() const {
  Object state(c10::AnyType::get(), c10::AnyType::get());
  if (!options_.enabled) return state;
  state.insert(std::string("scale"), static_cast<double>(scale_));
  state.insert(std::string("growth_factor"), options_.growth_factor);
  state.insert(std::string("backoff_factor"), options_.backoff_factor);
  state.insert(std::string("growth_interval"), options_.growth_interval);
  state.insert(std::string("_growth_tracker"), growth_tracker_);
  return state;
}

void GradScaler::load_state_dict(const c10::IValue& object) {
  if (!options_.enabled) return;
  if (!object.isGenericDict()) throw Error("the state of a scaler must be a dictionary");
  const Object state = object.toGenericDict();
  if (state.empty()) throw Error("the state of the scaler is empty: it comes from a scaler that was not enabled");
  GradScalerOptions options = options_;
  const double scale = number(state, "scale");
  options.init_scale = scale;
  options.growth_factor = number(state, "growth_factor");
  options.backoff_factor = number(state, "backoff_factor");
  options.growth_interval = static_cast<int64_t>(number(state, "growth_interval"));
  const auto tracker = static_cast<int64_t>(number(state, "_growth_tracker"));
  check(options);
  options.init_scale = options_.init_scale;
  options_ = options;
  scale_ = static_cast<float>(scale);
  growth_tracker_ = tracker;
}

}  // namespace lockstep
