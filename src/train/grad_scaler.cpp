#include <lockstep/grad_scaler.h>

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/error.h>

#include "base/state_in_use.h"
#include "reducer/followed_result.h"
#include "reducer/gradient_hook.h"
#include "reducer/gradient_marks.h"
#include "reducer/scaled_passes.h"
#include "train/divided_gradients.h"
#include "train/in_checkpoint.h"
#include "train/optimizer_tensors.h"
#include "train/scaler_refusals.h"
#include "train/scaler_troubles.h"
#include "train/scaler_word.h"
#include "train/used_gradients.h"

namespace lockstep {
namespace {

using Object = c10::impl::GenericDict;

/// Below this a scale loses digits, and finally is 0.
constexpr float kSmallestScale = std::numeric_limits<float>::min();

/// A scale is a float.
void check_scale(const char* what, double scale) {
  const auto rounded = static_cast<float>(scale);
  TORCH_CHECK(std::isfinite(rounded) && rounded >= kSmallestScale, what, " is ", scale,
              "; it must be a normal float above 0");
}

void check(const GradScalerOptions& options) {
  check_scale("GradScaler: init_scale", options.init_scale);
  TORCH_CHECK(options.growth_factor > 1 && options.backoff_factor > 0 && options.backoff_factor < 1 &&
                  options.growth_interval > 0,
              "GradScaler: growth_factor must be above 1, backoff_factor between 0 and 1, growth_interval above 0");
}

constexpr const char* kScaledTwice =
    "gave scale() a value that was computed from a loss that scale() had already scaled, so its gradients would have "
    "the scale twice; call scale() once, on the loss on which backward() is called";

constexpr const char* kScaledInCheckpoint =
    "called scale() in a function that it gave to checkpoint(), whose backward runs separately, so the scaler cannot "
    "follow it; call scale() last, on the result of checkpoint(), and backward() on the result of scale()";

constexpr const char* kClearedByAll =
    "GradScaler: all gradients of the optimizer were cleared between backward() and the scaler's step, as "
    "zero_grad(/*set_to_none=*/false) does, so its gradients would all be zero in the step; call zero_grad() before "
    "backward(), or after "
    "step()";

/// `found`: see unscale_local().
ScalerWord word_of(const char* call, float scale, const std::optional<KnownGradients>& known, const at::Tensor& found,
                   bool is_in_trouble) {
  ScalerWord word;
  word[kInfinity] = found[0].item<float>();
  word[kGradient] = found[1].item<float>();
  word[kTrouble] = is_in_trouble ? 1 : 0;
  word[kPresent] = known && known->absent ? 0 : 1;
  word[kScale] = scale;
  word[kUnscales] = call == kUnscale ? 1 : 0;
  const bool tells = known && known->edits.any;
  word[kCleared] = !tells ? kNotKnown : known->edits.all_cleared ? kAllCleared : as_float(known->edits.cleared);
  word[kOptimizer] = known ? as_float(known->identity) : kNotKnown;
  return word;
}

double number(const Object& state, const char* name) {
  const auto found = state.find(std::string(name));
  if (found == state.end() || !(found->value().isDouble() || found->value().isInt()))
    throw Error("the state of the scaler has no number `" + std::string(name) + "`");
  return found->value().toScalar().toDouble();
}

}  // namespace

GradScaler::GradScaler(GradScalerOptions options)
    : options_(options), scale_(static_cast<float>(options.init_scale)), finite_at_(scale_) {
  check(options_);
  if (!options_.enabled) return;
  passes_ = std::make_shared<ScaledPasses>(scale_);
  divided_ = std::make_shared<DividedGradients>();
  used_ = std::make_shared<UsedGradients>();
}

GradScaler::GradScaler(const Group& group, GradScalerOptions options) : GradScaler(options) { group_ = group; }

GradScaler::GradScaler(GradScaler&& other) noexcept = default;
GradScaler& GradScaler::operator=(GradScaler&& other) noexcept = default;

GradScaler::~GradScaler() {
  if (!passes_ || std::uncaught_exceptions() > 0) return;
  try {
    const std::string stepped = stepped_beside_scaler();
    const std::string trouble = stepped.empty() ? used_->trouble() : trouble_of_step_beside(stepped);
    if (!trouble.empty()) TORCH_WARN("a GradScaler ends, and this rank ", trouble);
  } catch (const std::exception&) {  // a handler that turns warnings into errors
  }
}

void GradScaler::check_usable() const {
  TORCH_CHECK(passes_, "GradScaler: it was moved from; use the object that it was moved to");
}

at::Tensor GradScaler::scale(const at::Tensor& outputs) const {
  if (!options_.enabled) return outputs;
  check_usable();
  TORCH_CHECK(outputs.defined(), "GradScaler: scale() was given an undefined tensor; give it the loss");
  if (comes_from_followed_result(outputs)) trouble_ = kScaledTwice;
  if (InCheckpoint::here()) trouble_ = kScaledInCheckpoint;
  scaled_ = true;
  const at::Tensor scaled = outputs * at::scalar_tensor(scale_, outputs.options().dtype(at::kFloat));
  follow_result(scaled, [passes = passes_, divided = divided_, scale = scale_](int backward, const WayToResult& way) {
    if (!passes->add(backward, way, scale) || !divided->any()) return;
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
  // Zeros, for example kept by a rank without a backward, have any scale.
  return any_is_not_zero(optimizer) || (all > 0 && all_are_empty(optimizer)) ? "ran backward" : "";
}

std::string GradScaler::trouble_before(const char* call, const TensorSet& parameters,
                                       const std::optional<KnownGradients>& known) const {
  if (!trouble_.empty()) return trouble_;
  if (std::string wrong = trouble_of(passes_->take_wrong(), scale_); !wrong.empty()) return wrong;
  if (std::string used = used_->trouble(); !used.empty()) return used;
  for (const auto& [other, found] : found_)
    if (found.passes == passes_->count() && any_of_set(found.parameters, parameters)) return kDividedTwice;
  const std::string trouble = known ? trouble_of_gradients(call, parameters, *known, *passes_) : "";
  if (!trouble.empty()) return trouble;
  if (divided_->added_to_used(parameters)) return kAddedToUsed;
  if (const std::string stepped = stepped_beside_scaler(); !stepped.empty()) return trouble_of_step_beside(stepped);
  if (!known && loaded_after_ && *loaded_after_ == passes_->count()) return trouble_of_new_scale("load_state_dict()");
  return "";
}

GradScaler::Found GradScaler::unscale_in(const char* call, torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> list = list_of_parameters(optimizer);
  const TensorSet parameters = set_of(list);
  const auto known = known_gradients(parameters);
  const std::string trouble = trouble_before(call, parameters, known);
  const std::string unscaled = trouble.empty() ? unscaled_passes(optimizer, known) : "";
  trouble_.clear();
  const at::Tensor found = trouble.empty() ? unscale_local(optimizer) : at::zeros({2}, at::kFloat);
  const auto ranks = group_ || !known ? group_ : known->ranks;
  const ScalerWords said = [&] {
    try {
      return tell(ranks, word_of(call, scale_, known, found, !trouble.empty() || !unscaled.empty()));
    } catch (const Error& error) {  // the others are elsewhere, perhaps for the same reason
      if (trouble.empty()) throw;
      throw Error("GradScaler: this rank " + trouble + "\n" + error.what());
    }
  }();
  if (said.smallest[kScale] == kDisabled) refuse_disabled_on_some(*ranks, /*is_enabled=*/true);
  // Gradients divided by different numbers have no mean.
  if (said.differ(kScale))
    throw Error(c10::str("GradScaler: the ranks have different scales, from ", said.smallest[kScale], " to ",
                         said.largest[kScale],
                         "; make it with the same options and load the same state on every rank, and give update() the "
                         "same new_scale"));
  if (said.largest[kTrouble] > 0) {
    used_->clear();
    refuse(ranks, trouble, unscaled, scaled_);
  }
  if (said.differ(kUnscales)) refuse_different_calls(*ranks, call);
  if (said.differ(kOptimizer))
    refuse_different_optimizers(*ranks, call, known ? known->first_name : "", list.size(), known ? known->identity : 0);
  if (said.differ(kCleared)) refuse_cleared(*ranks, known && known->edits.cleared_here);
  const bool nothing = said.largest[kGradient] == 0 && said.largest[kPresent] == 0;
  TORCH_CHECK(said.largest[kGradient] > 0 || nothing,
              "GradScaler: no parameter of the optimizer has a gradient; call backward() first, and zero_grad(), "
              "which clears gradients, before backward() or after step()");
  if (said.largest[kCleared] == kAllCleared) throw Error(kClearedByAll);
  accept_gradients(parameters);
  if (!known) divided_->add(identity_of(optimizer), list);
  used_->replaced(list);
  const bool infinity = said.largest[kInfinity] > 0;
  if (infinity) used_->found_infinity(list);
  Found result{.infinity = infinity, .nothing = nothing, .passes = passes_->count(), .parameters = std::move(list)};
  if (call == kUnscale && !infinity && !nothing) {
    result.may_be_cleared = !any_is_not_zero(optimizer) && !all_are_empty(optimizer);
    if (!ranks) result.marks = marks_of_gradients(result.parameters);
  }
  return result;
}

void GradScaler::check_gradients_since(torch::optim::Optimizer& optimizer, const Found& found) {
  if (!found.may_be_cleared && !any_is_not_zero(optimizer) && !all_are_empty(optimizer)) {
    const auto known = known_gradients(set_of(found.parameters));
    if (!known || !known->settled) throw Error(std::string("GradScaler: this rank ") + kClearedAfter);
  }
  if (!found.marks.empty() && found.marks != marks_of_gradients(found.parameters) && !all_are_finite(optimizer))
    throw Error(std::string("GradScaler: this rank ") + kInfiniteAfter);
}

void GradScaler::check_later_passes(uint64_t identity, const Found& found) {
  const bool is_mixed = divided_->use(identity);
  size_t later = 0;
  if (const auto known = found.passes != passes_->count() ? known_gradients(set_of(found.parameters)) : std::nullopt)
    for (const RecordedPass& pass : known->passes)
      if (!pass.unscaled && ScaledPasses::known_to_any(pass.number)) ++later;
  if (is_mixed || later > 0) throw Error("GradScaler: this rank " + trouble_of_later_passes(later));
}

void GradScaler::tell_disabled(torch::optim::Optimizer& optimizer) {
  if (has_told_disabled_) return;
  const auto known = known_gradients(set_of(list_of_parameters(optimizer)));
  const auto ranks = group_ || !known ? group_ : known->ranks;
  if (!ranks) return;
  has_told_disabled_ = true;
  ScalerWord word;
  word.fill(kNotKnown);
  word[kScale] = kDisabled;
  if (tell(ranks, word).largest[kScale] != kDisabled) refuse_disabled_on_some(*ranks, /*is_enabled=*/false);
}

void GradScaler::unscale(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) return tell_disabled(optimizer);
  check_usable();
  const uint64_t identity = identity_of(optimizer);
  const auto before = found_.find(identity);
  TORCH_CHECK(before == found_.end(), "GradScaler: unscale(): the gradients of this optimizer ",
              before != found_.end() && before->second.stepped ? "were used by step() since the last update()"
                                                               : "were already unscaled since the last update()");
  found_[identity] = unscale_in(kUnscale, optimizer);
}

bool GradScaler::step(torch::optim::Optimizer& optimizer) {
  if (!options_.enabled) {
    tell_disabled(optimizer);
    optimizer.step();
    return true;
  }
  check_usable();
  const uint64_t identity = identity_of(optimizer);
  auto place = found_.find(identity);
  if (place == found_.end()) place = found_.emplace(identity, unscale_in(kStep, optimizer)).first;
  Found& found = place->second;
  if (!found.stepped) check_later_passes(identity, found);
  TORCH_CHECK(!found.stepped, "GradScaler: step() was already called for this optimizer since the last update()");
  found.stepped = true;
  if (found.infinity) return false;
  check_gradients_since(optimizer, found);
  optimizer.step();  // an optimizer that sums gradients itself still has to learn that there are none
  note_in_use({.object = passes_.get(),
               .life = passes_,
               .name = "a GradScaler whose step() is called",
               .line = "checkpointer.add(\"scaler\", scaler)"});
  if (!optimizer.state().empty()) note_optimizer_in_use(&optimizer, passes_);
  used_->stepped(optimizer);
  return !found.nothing;
}

void GradScaler::refuse_update() {
  constexpr const char* kWhat =
      "called update() without a step() or unscale() since the last update() (optimizer.step() does not count: call "
      "scaler.step(optimizer))";
  if (scaled_ && group_) {  // others may be in step()
    ScalerWord word;
    word.fill(kNotKnown);
    word[kScale] = scale_;
    word[kTrouble] = 1;
    tell(group_, word);
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
  if (const std::string used = used_->trouble(); !used.empty()) {
    used_->clear();
    throw Error("GradScaler: this rank " + used);
  }
  const bool infinity =
      std::any_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.infinity; });
  const bool nothing =
      std::all_of(found_.begin(), found_.end(), [](const auto& entry) { return entry.second.nothing; });
  const auto lowered = static_cast<float>(static_cast<double>(scale_) * options_.backoff_factor);
  if (infinity && !new_scale && lowered < kSmallestScale)
    throw Error(
        c10::str("GradScaler: update() would lower the scale below the smallest normal float, because every step "
                 "since the scale was ",
                 finite_at_,
                 " has had infinity or NaN in a gradient; the loss itself is "
                 "probably not finite, or the weights are not"));
  found_.clear();
  divided_->clear();
  loaded_after_.reset();
  scaled_ = false;
  if (new_scale) {
    check_scale("update(): new_scale", *new_scale);
    scale_ = static_cast<float>(*new_scale);
  } else if (infinity) {
    scale_ = lowered;
    growth_tracker_ = 0;
  } else if (!nothing && ++growth_tracker_ == options_.growth_interval) {
    const auto grown = static_cast<float>(static_cast<double>(scale_) * options_.growth_factor);
    if (std::isfinite(grown)) scale_ = grown;
    growth_tracker_ = 0;
  }
  if (!infinity || new_scale) finite_at_ = scale_;
  passes_->update(scale_);
}

c10::IValue GradScaler::state_dict() const {
  note_kept(passes_.get());
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
  finite_at_ = scale_ = static_cast<float>(scale);
  growth_tracker_ = tracker;
  note_kept(passes_.get());
  passes_->set_scale(scale_);
}

}  // namespace lockstep
