#include <lockstep/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/error.h>

#include "rank_page/operation_label.h"
#include "reducer/followed_result.h"
#include "reducer/gradient_hook.h"
#include "reducer/gradient_marks.h"
#include "reducer/scaled_passes.h"
#include "train/divided_gradients.h"
#include "train/scaler_refusals.h"
#include "train/scaler_troubles.h"

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

std::vector<at::Tensor> list_of_parameters(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

TensorSet parameters_of(const torch::optim::Optimizer& optimizer) {
  TensorSet parameters;
  for (const at::Tensor& parameter : list_of_parameters(optimizer)) parameters.insert(parameter.unsafeGetTensorImpl());
  return parameters;
}

bool shares_parameters(const torch::optim::Optimizer& optimizer, const TensorSet& parameters) {
  const std::vector<at::Tensor> all = list_of_parameters(optimizer);
  return std::any_of(all.begin(), all.end(),
                     [&](const at::Tensor& parameter) { return parameters.contains(parameter.unsafeGetTensorImpl()); });
}

bool any_is_not_zero(torch::optim::Optimizer& optimizer) {
  for (const auto& [kind, gradients] : gradients_of(optimizer))
    for (const at::Tensor& gradient : gradients)
      if (gradient.any().item<bool>()) return true;
  return false;
}

/// What ranks tell each other as they unscale, in one message of which all get the largest: of numbers that must be
/// equal, and of their negatives.
enum Said {
  kInfinity,
  kGradient,
  kScale,
  kMinusScale,
  kUnscales,
  kMinusUnscales,
  kTrouble,
  kPresent,
  kCleared,
  kMinusCleared,
  kSaid
};

constexpr const char* kScaledTwice =
    "gave scale() what was computed from a loss that scale() had scaled already, so its gradients would have the scale "
    "twice; call scale() once, on the loss that backward() is called on";

/// Of a rank that cannot tell which gradients were cleared.
constexpr float kUnknown = -std::numeric_limits<float>::infinity();

/// Of what a first parameter's steps leave in the optimizer; 0 where that is not known.
uint64_t sample_of_state(torch::optim::Optimizer& optimizer) {
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) {
      const auto found = optimizer.state().find(parameter.unsafeGetTensorImpl());
      if (found == optimizer.state().end()) continue;
      at::Tensor state;
      if (const auto* sgd = dynamic_cast<const torch::optim::SGDParamState*>(found->second.get()))
        state = sgd->momentum_buffer();
      else if (const auto* adam = dynamic_cast<const torch::optim::AdamParamState*>(found->second.get()))
        state = adam->exp_avg_sq();
      else if (const auto* adamw = dynamic_cast<const torch::optim::AdamWParamState*>(found->second.get()))
        state = adamw->exp_avg_sq();
      return state.defined() && state.is_cpu() ? sample_of(state) : 0;
    }
  return 0;
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
  if (!options_.enabled) return;
  passes_ = std::make_shared<ScaledPasses>(scale_);
  divided_ = std::make_shared<DividedGradients>();
}

GradScaler::GradScaler(const Group& group, GradScalerOptions options) : GradScaler(options) { group_ = group; }

GradScaler::GradScaler(GradScaler&& other) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&& other) noexcept = default;

GradScaler::~GradScaler() {
  if (!passes_ || std::uncaught_exceptions() > 0) return;
  try {
    if (const std::string stepped = stepped_beside_scaler(); !stepped.empty())
      TORCH_WARN("a GradScaler ends, and this rank ", trouble_of_step_beside(stepped));
  } catch (const std::exception&) {  // a handler that makes errors of warnings
  }
}

void GradScaler::check_usable() const {
  TORCH_CHECK(passes_, "GradScaler: it was moved from; use the one that it was moved to");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  if (!options_.enabled) return outputs;
  check_usable();
  TORCH_CHECK(outputs.defined(), "GradScaler: scale() was given an undefined tensor; give it the loss");
  if (comes_from_followed_result(outputs)) trouble_ = kScaledTwice;
  scaled_ = true;
  const at::Tensor scaled = outputs * at::scalar_tensor(scale_, outputs.options().dtype(at::kFloat));
  follow_result(scaled, [passes = passes_, divided = divided_, scale = scale_](
                            int backward, std::shared_ptr<const TensorSet> beside) {
    if (!passes->add(backward, std::move(beside), scale) || !divided->any()) return;
    divided->backward_begins();
    at_end_of_backward([divided](bool) { divided->backward_ends(); });
  });
  return scaled;
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

std::string GradScaler::unscaled_passes(torch::optim::Optimizer& optimizer,
                                        const std::optional<KnownGradients>& known) const {
  const size_t all = known ? known->passes.size() : 0;
  size_t unscaled = 0;
  for (size_t i = 0; i < all; ++i)
    if (passes_->scale_of(known->passes[i].number) == ScaledPasses::Scale::kNone) ++unscaled;
  if (unscaled > 0 && unscaled < all)
    return "ran " + std::to_string(unscaled) + " of " + std::to_string(all) + " backward passes";
  if (unscaled == 0 && (all > 0 || scaled_ || (known && !known->contributed))) return "";
  // Zeros, such as a rank without a backward has kept, have any scale.
  return any_is_not_zero(optimizer) ? "ran backward" : "";
}

std::string GradScaler::trouble_before(const char* call, const TensorSet& parameters,
                                       const std::optional<KnownGradients>& known) const {
  if (!trouble_.empty()) return trouble_;
  if (const auto stale = passes_->take_stale_scale()) return trouble_of_stale_scale(*stale, scale_);
  for (const auto& [other, found] : found_)
    if (found.passes == passes_->count() && shares_parameters(*other, parameters)) return kDividedTwice;
  const std::string trouble = known ? trouble_of_gradients(call, parameters, *known, *passes_) : "";
  if (!trouble.empty()) return trouble;
  if (const std::string stepped = stepped_beside_scaler(); !stepped.empty()) return trouble_of_step_beside(stepped);
  if (!known && loaded_after_ && *loaded_after_ == passes_->count()) return trouble_of_new_scale("load_state_dict()");
  return "";
}

GradScaler::Found GradScaler::unscale_in(const char* call, torch::optim::Optimizer& optimizer) {
  const TensorSet parameters = parameters_of(optimizer);
  const auto known = known_gradients(parameters);
  const std::string trouble = trouble_before(call, parameters, known);
  const std::string unscaled = trouble.empty() ? unscaled_passes(optimizer, known) : "";
  trouble_.clear();
  const at::Tensor found = trouble.empty() ? unscale_local(optimizer) : at::zeros({2}, at::kFloat);
  const auto ranks = group_ || !known ? group_ : known->ranks;
  std::vector<float> said(kSaid);
  said[kInfinity] = found[0].item<float>();
  said[kGradient] = found[1].item<float>();
  said[kScale] = scale_;
  said[kUnscales] = call == kUnscale ? 1 : 0;
  said[kTrouble] = trouble.empty() && unscaled.empty() ? 0 : 1;
  said[kPresent] = known && known->absent ? 0 : 1;
  const bool tells = known && known->edits.any;
  constexpr uint64_t kExact = (uint64_t{1} << 24) - 1;  // as a float
  const auto cleared = static_cast<float>(tells ? known->edits.cleared & kExact : 0);
  said[kCleared] = tells ? cleared : kUnknown;
  said[kMinusCleared] = tells ? -cleared : kUnknown;
  if (ranks) {
    // Elsewhere `enabled` may be false. One label for both calls: what ranks gather under two is not compared further.
    const OperationLabel label("GradScaler{enabled = true}::step()");
    said[kMinusScale] = -said[kScale];
    said[kMinusUnscales] = -said[kUnscales];
    const at::Tensor all = at::tensor(said);
    try {
      ranks->all_reduce(all, ReduceOp::kMax);
    } catch (const Error& error) {  // the others are elsewhere, for the same reason perhaps
      if (trouble.empty()) throw;
      throw Error("GradScaler: this rank " + trouble + "\n" + error.what());
    }
    std::copy_n(all.const_data_ptr<float>(), said.size(), said.begin());
    // Gradients divided by different numbers have no mean.
    if (const float largest = said[kScale], smallest = -said[kMinusScale]; largest != smallest)
      throw Error(c10::str("GradScaler: the ranks have different scales, from ", smallest, " to ", largest,
                           "; make it with the same options and load the same state on every rank, and give update() "
                           "the same new_scale"));
    if (said[kTrouble] == 0 && said[kUnscales] != -said[kMinusUnscales]) refuse_different_calls(*ranks, call);
  }
  if (said[kTrouble] > 0) refuse(ranks, trouble, unscaled, scaled_);
  if (ranks && said[kCleared] != kUnknown && said[kCleared] != -said[kMinusCleared])
    refuse_cleared(*ranks, known && known->edits.cleared_here);
  const bool nothing = said[kGradient] == 0 && said[kPresent] == 0;
  TORCH_CHECK(said[kGradient] > 0 || nothing,
              "GradScaler: no parameter of the optimizer has a gradient; call backward() first");
  accept_gradients(parameters);
  if (!known && call == kUnscale) divided_->add(&optimizer, list_of_parameters(optimizer));
  return {.infinity = said[kInfinity] > 0, .nothing = nothing, .passes = passes_->count()};
}

void GradScaler::check_later_passes(torch::optim::Optimizer& optimizer, const Found& found) {
  const bool is_mixed = divided_->remove(&optimizer);
  size_t later = 0;
  if (const auto known = found.passes != passes_->count() ? known_gradients(parameters_of(optimizer)) : std::nullopt)
    for (const RecordedPass& pass : known->passes)
      if (!pass.unscaled && ScaledPasses::known_to_any(pass.number)) ++later;
  if (is_mixed || later > 0) throw Error("GradScaler: this rank " + trouble_of_later_passes(later));
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  check_usable();
  const auto before = found_.find(&optimizer);
  TORCH_CHECK(before == found_.end(), "GradScaler: unscale(): the gradients of this optimizer ",
              before != found_.end() && before->second.stepped ? "were used by step() since the last update()"
                                                               : "were already unscaled since the last update()");
  found_[&optimizer] = unscale_in(kUnscale, optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  check_usable();
  if (!found_.contains(&optimizer)) {
    const Found found = unscale_in(kStep, optimizer);
    found_[&optimizer] = found;
  }
  Found& found = found_.at(&optimizer);
  if (!found.stepped) check_later_passes(optimizer, found);
  TORCH_CHECK(!found.stepped, "GradScaler: step() was already called for this optimizer since the last update()");
  found.stepped = true;
  if (!found.infinity) optimizer.step();  // one that sums gradients itself has still to learn that there is nothing
  found.state = sample_of_state(optimizer);
  return !found.infinity && !found.nothing;
}

void GradScaler::refuse_update() {
  constexpr const char* kWhat = "called update() without a step() or unscale() since the last one";
  if (scaled_ && group_) {  // others may be in step()
    std::vector<float> said(kSaid, kUnknown);
    said[kScale] = scale_;
    said[kMinusScale] = -scale_;
    said[kTrouble] = 1;
    {
      const OperationLabel label("GradScaler{enabled = true}::step()");
      group_->all_reduce(at::tensor(said), ReduceOp::kMax);
    }
    refuse(group_, kWhat, "", scaled_);
  }
  TORCH_CHECK(false, "GradScaler: this rank ", kWhat);
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  check_usable();
  if (found_.empty() && !new_scale) refuse_update();
  if (found_.empty() && scaled_gradients_wait(*passes_))
    throw Error("GradScaler: this rank " + trouble_of_new_scale("update(new_scale)"));
  if (const std::string stepped = stepped_beside_scaler(); !stepped.empty())
    throw Error("GradScaler: this rank " + trouble_of_step_beside(stepped));
  for (auto& [optimizer, found] : found_)
    TORCH_CHECK(!found.stepped || found.state == sample_of_state(*optimizer),
                "GradScaler: an optimizer stepped again between the scaler's step() and update(): optimizer.step() was "
                "called, too; call only scaler.step(optimizer)");
  const bool infinity =
      std::any_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.infinity; });
  const bool nothing =
      std::all_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.nothing; });
  found_.clear();
  divided_->clear();
  loaded_after_.reset();
  scaled_ = false;
  if (new_scale) {
    check_scale("update(): new_scale", *new_scale);
    scale_ = static_cast<float>(*new_scale);
  } else if (infinity) {
    scale_ = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
    growth_tracker_ = 0;
  } else if (!nothing && ++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    growth_tracker_ = 0;
  }
  passes_->update(scale_);
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
  check_usable();
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
  if (scaled_gradients_wait(*passes_))
    throw Error("GradScaler: this rank " + trouble_of_new_scale("load_state_dict()"));
  if (passes_->count_since_update() > 0) loaded_after_ = passes_->count();
  options.init_scale = options_.init_scale;
  options_ = options;
  scale_ = static_cast<float>(scale);
  growth_tracker_ = tracker;
  passes_->set_scale(scale_);
}

}  // namespace lockstep
