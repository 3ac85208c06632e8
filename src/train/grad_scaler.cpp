#include <lockstep/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <set>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/counted.h"
#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "reducer/gradient_hook.h"
#include "reducer/gradient_marks.h"
#include "reducer/scaled_passes.h"

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

TensorSet parameters_of(torch::optim::Optimizer& optimizer) {
  TensorSet parameters;
  for (const auto& group : optimizer.param_groups())
    for (const at::Tensor& parameter : group.params()) parameters.insert(parameter.unsafeGetTensorImpl());
  return parameters;
}

bool any_is_not_zero(torch::optim::Optimizer& optimizer) {
  for (const auto& [kind, gradients] : gradients_of(optimizer))
    for (const at::Tensor& gradient : gradients)
      if (gradient.any().item<bool>()) return true;
  return false;
}

/// What ranks tell each other as they unscale, in one message of which all get the largest: of numbers that must be
/// equal, and of their negatives.
enum Said { kInfinity, kGradient, kScale, kMinusScale, kUnscales, kMinusUnscales, kUnscaled, kPresent, kSaid };

constexpr const char* kUnscale = "unscale()";
constexpr const char* kStep = "step()";

[[noreturn]] void refuse_different_calls(const Group& ranks, const char* call) {
  const auto calls = ranks.all_gather_bytes(call);
  throw Error("GradScaler: " + ranks_with(calls, std::string(kUnscale)) + " called unscale(), and " +
              ranks_with(calls, std::string(kStep)) +
              " step() without it; call unscale() before step() on every rank or on none");
}

/// `unscaled`: this rank's passes without scale(), if any. Every rank of `ranks` calls it once one has some.
[[noreturn]] void refuse_unscaled(const std::optional<Group>& ranks, const std::string& unscaled, bool scaled) {
  const std::string own = unscaled.empty() && scaled ? "scaled" : unscaled;
  const auto told = ranks ? ranks->all_gather_bytes(own) : std::vector<std::string>{own};
  std::string who;
  bool any_scaled = false;
  for (size_t rank = 0; rank < told.size(); ++rank) {
    any_scaled = any_scaled || told[rank] == "scaled" || told[rank].find(" of ") != std::string::npos;
    const auto here = told.begin() + static_cast<std::ptrdiff_t>(rank);
    if (told[rank].empty() || told[rank] == "scaled" || std::find(told.begin(), here, told[rank]) != here) continue;
    who += (who.empty() ? "" : ", ") + (ranks ? ranks_with(told, told[rank]) : "this rank") + " " + told[rank];
  }
  const bool others = std::find(told.begin(), told.end(), "scaled") != told.end();
  throw Error("GradScaler: " + who + " without scale() since the last update()" +
              (others ? ", and " + ranks_with(told, std::string("scaled")) + " with it" : "") +
              (any_scaled ? ", so the gradients have different scales."
                          : ", so the gradients do not have the scale by which they would be divided.") +
              " Call scaler.scale(loss).backward() on every rank and in every pass; one without a batch calls "
              "skip_step() in place of its backward");
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
  if (options_.enabled) passes_ = std::make_shared<ScaledPasses>();
}

GradScaler::GradScaler(const Group& group, GradScalerOptions options) : GradScaler(options) { group_ = group; }

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  if (!options_.enabled) return outputs;
  TORCH_CHECK(
      !comes_from_followed_result(outputs),
      "GradScaler: scale() was given what was computed from a loss that scale() had scaled already, so its gradients "
      "would have the scale twice; call scale() once, on the loss that backward() is called on");
  scaled_ = true;
  const at::Tensor scaled = outputs * at::scalar_tensor(scale_, outputs.options().dtype(at::kFloat));
  follow_result(scaled, [passes = passes_](int backward) { passes->add(backward); });
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
  const std::set<int> passes = known ? std::set<int>(known->passes.begin(), known->passes.end()) : std::set<int>();
  const auto unscaled = std::count_if(passes.begin(), passes.end(), [&](int one) { return !passes_->contains(one); });
  const auto all = static_cast<std::ptrdiff_t>(passes.size());
  if (unscaled > 0 && unscaled < all)
    return "ran " + std::to_string(unscaled) + " of " + std::to_string(all) + " backward passes";
  if (unscaled == 0 && (all > 0 || scaled_ || (known && !known->contributed))) return "";
  // Zeros, such as a rank without a backward has kept, have any scale.
  return any_is_not_zero(optimizer) ? "ran backward" : "";
}

GradScaler::Found GradScaler::unscale_in(const char* call, torch::optim::Optimizer& optimizer) {
  const TensorSet parameters = parameters_of(optimizer);
  const auto known = known_gradients(parameters);
  TORCH_CHECK(!known || known->held_back == 0, "GradScaler: ", call, " was called while the gradients of ",
              counted(known ? known->held_back : 0, "backward pass", "backward passes"),
              " of accumulate() wait in .grad, this rank's own and not reduced yet; call it when step_complete() is "
              "true, or after reduce_gradients()");
  const at::Tensor found = unscale_local(optimizer);
  const auto ranks = group_ || !known ? group_ : known->ranks;
  const std::string unscaled = unscaled_passes(optimizer, known);
  std::vector<float> said(kSaid);
  said[kInfinity] = found[0].item<float>();
  said[kGradient] = found[1].item<float>();
  said[kScale] = scale_;
  said[kUnscales] = call == kUnscale ? 1 : 0;
  said[kUnscaled] = unscaled.empty() ? 0 : 1;
  said[kPresent] = known && known->absent ? 0 : 1;
  if (ranks) {
    // Elsewhere `enabled` may be false. One label for both calls: what ranks gather under two is not compared further.
    const OperationLabel label("GradScaler{enabled = true}::step()");
    said[kMinusScale] = -said[kScale];
    said[kMinusUnscales] = -said[kUnscales];
    const at::Tensor all = at::tensor(said);
    ranks->all_reduce(all, ReduceOp::kMax);
    std::copy_n(all.const_data_ptr<float>(), said.size(), said.begin());
    // Gradients divided by different numbers have no mean.
    if (const float largest = said[kScale], smallest = -said[kMinusScale]; largest != smallest)
      throw Error(c10::str("GradScaler: the ranks have different scales, from ", smallest, " to ", largest,
                           "; make it with the same options and load the same state on every rank, and give update() "
                           "the same new_scale"));
    if (said[kUnscales] != -said[kMinusUnscales]) refuse_different_calls(*ranks, call);
  }
  if (said[kUnscaled] > 0) refuse_unscaled(ranks, unscaled, scaled_);
  const bool nothing = said[kGradient] == 0 && said[kPresent] == 0;
  TORCH_CHECK(said[kGradient] > 0 || nothing,
              "GradScaler: no parameter of the optimizer has a gradient; call backward() first. With "
              "set_non_finite_policy(NonFinitePolicy::kSkip) it is already gone: use either the scaler or the policy");
  accept_gradients(parameters);
  return {.infinity = said[kInfinity] > 0, .nothing = nothing};
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return;
  const auto before = found_.find(&optimizer);
  TORCH_CHECK(before == found_.end(), "unscale(): the gradients of this optimizer ",
              before != found_.end() && before->second.stepped ? "were used by step() since the last update()"
                                                               : "were already unscaled since the last update()");
  found_[&optimizer] = unscale_in(kUnscale, optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    optimizer.step();
    return true;
  }
  if (!found_.contains(&optimizer)) {
    const Found found = unscale_in(kStep, optimizer);
    found_[&optimizer] = found;
  }
  Found& found = found_.at(&optimizer);
  TORCH_CHECK(!found.stepped, "step(): already called for this optimizer since the last update()");
  found.stepped = true;
  if (!found.infinity) optimizer.step();  // one that sums gradients itself has still to learn that there is nothing
  return !found.infinity && !found.nothing;
}

void GradScaler::update(std::optional<double> new_scale) {
  if (!options_.enabled) return;
  TORCH_CHECK(!found_.empty(), "update(): there was no step() or unscale() since the last update()");
  const bool infinity =
      std::any_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.infinity; });
  const bool nothing =
      std::all_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.nothing; });
  found_.clear();
  passes_->clear();
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
