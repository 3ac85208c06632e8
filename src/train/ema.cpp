#include <lockstep/ema.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <ATen/core/Dict.h>
#include <ATen/core/List.h>
#include <ATen/core/grad_mode.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

#include "base/broadcast_notice.h"
#include "base/shared_weights.h"
#include "base/state_in_use.h"
#include "base/weights_set.h"
#include "checkpoint/state_fit.h"
#include "collectives/machine_memory.h"
#include "collectives/module_watch.h"
#include "collectives/storages.h"

namespace lockstep {
namespace {

using Object = c10::impl::GenericDict;

/// A dtype in which lerp's steps are not lost: 16 bits hold three digits, and a decay of 0.9999 changes the fourth.
at::ScalarType dtype_of_average(const at::Tensor& live) {
  return live.scalar_type() == at::kHalf || live.scalar_type() == at::kBFloat16 ? at::kFloat : live.scalar_type();
}

bool same_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.is_same(b) || (a.numel() > 0 && a.storage().is_alias_of(b.storage()) && a.data_ptr() == b.data_ptr() &&
                          a.sizes() == b.sizes() && a.strides() == b.strides());
}

std::string text_of(const auto& value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

c10::IValue ema_entry(const Object& state, const char* name) {
  const auto found = state.find(std::string(name));
  return found == state.end() ? c10::IValue() : found->value();
}

std::vector<c10::IValue> list_of(const Object& state, const char* name) {
  const c10::IValue value = ema_entry(state, name);
  if (!value.isList()) throw Error("the state of the averages has no list `" + std::string(name) + "`");
  return value.toList().vec();
}

/// Adds to `problems` the differences between a state's averages for one decay and ours.
void compare(const StateDict& given, const std::vector<std::pair<std::string, at::Tensor>>& own, const std::string& of,
             std::string& problems) {
  std::set<std::string> known;
  for (const auto& [name, tensor] : own) {
    known.insert(name);
    const at::Tensor* value = given.find(name);
    if (value == nullptr)
      problems += "\n  missing: " + name + of;
    else if (const std::string problem = problem_of_copy(*value, tensor, "the Ema"); !problem.empty())
      problems += "\n  " + name + of + ": " + problem;
    else if (value->sizes() != tensor.sizes())
      problems += "\n  shape of " + name + of + ": " + text_of(value->sizes()) + " given, " + text_of(tensor.sizes()) +
                  " in the model";
  }
  for (const auto& item : given)
    if (!known.contains(item.key())) problems += "\n  unknown: " + item.key() + of;
}

StateDict named(const auto& list) {
  StateDict result;
  for (const auto& item : list) result.insert(item.key(), item.value());
  return result;
}

}  // namespace

Ema::Ema(const torch::nn::Module& module, EmaOptions options)
    : Ema(named(module.named_parameters()), named(module.named_buffers()), std::move(options)) {
  module_ = module.weak_from_this();
  if (!module_.expired()) watch_ = std::make_shared<ModuleWatch>(module);
}

Ema::Ema(StateDict parameters, StateDict buffers, EmaOptions options) : options_(std::move(options)) {
  TORCH_CHECK(!options_.decays.empty(), "Ema: decays is empty; give at least one decay");
  for (const double decay : options_.decays)
    TORCH_CHECK(decay >= 0 && decay < 1, "Ema: a decay must be at least 0 and below 1, such as 0.9999; not ", decay);
  TORCH_CHECK(options_.warmup_gamma > 0 && std::isfinite(options_.warmup_gamma) && options_.warmup_power > 0 &&
                  std::isfinite(options_.warmup_power) && options_.update_after_step >= 0,
              "Ema: warmup_gamma and warmup_power must be above 0, update_after_step at least 0; they are ",
              options_.warmup_gamma, ", ", options_.warmup_power, " and ", options_.update_after_step);
  TORCH_CHECK(options_.min_decay >= 0 && options_.min_decay < 1, "Ema: min_decay must be at least 0 and below 1, not ",
              options_.min_decay);
  for (const double decay : options_.decays)
    TORCH_CHECK(options_.min_decay <= decay, "Ema: min_decay is ", options_.min_decay, ", above the decay ", decay,
                ", which it would replace; set it to at most the smallest of the decays");
  track(parameters, true);
  track(buffers, options_.average_buffers);
  TORCH_CHECK(!tracked_.empty(), "Ema: the module has neither parameters nor buffers");
  before_first_update_ = on_broadcast([tracked = tracked_](const SetTensors& set) {
    const at::NoGradGuard no_grad;
    for (const auto& [live, averages] : tracked)
      if (set.contains(live.unsafeGetTensorImpl()))
        for (const at::Tensor& average : averages) average.copy_(live);
  });
}

void Ema::track(const StateDict& tensors, bool average) {
  at::NoGradGuard no_grad;
  for (const auto& item : tensors) {
    const at::Tensor& live = item.value();
    if (!live.defined()) continue;
    const auto known = std::find_if(tracked_.begin(), tracked_.end(),
                                    [&](const Tracked& tracked) { return same_memory(tracked.live, live); });
    names_.emplace_back(item.key(), static_cast<size_t>(known - tracked_.begin()));
    if (known != tracked_.end()) continue;
    tracked_.push_back({live, {}});
    if (!average || !(live.is_floating_point() || live.is_complex())) continue;
    for (size_t i = 0; i < options_.decays.size(); ++i)
      tracked_.back().averages.push_back(
          live.detach().to(dtype_of_average(live), /*non_blocking=*/false, /*copy=*/true));
  }
}

double Ema::decay_at(double decay, int64_t update) const {
  const int64_t since = update - 1 - options_.update_after_step;
  if (since <= 0 && (options_.warm_up || options_.update_after_step > 0)) return 0;
  if (!options_.warm_up) return decay;
  const double risen = 1 - std::pow(1 + static_cast<double>(since) / options_.warmup_gamma, -options_.warmup_power);
  return std::max(std::min(risen, decay), options_.min_decay);
}

void Ema::check_covers_module(const char* operation) const {
  const auto module = module_.lock();
  if (module == nullptr) return;
  std::map<std::string, size_t> known(names_.begin(), names_.end());
  const auto look_at = [&](const auto& tensors) {
    for (const auto& item : tensors) {
      if (!item.value().defined()) continue;
      const auto found = known.find(item.key());
      TORCH_CHECK(found != known.end() && same_memory(tracked_[found->second].live, item.value()), operation, ": `",
                  item.key(),
                  "` has changed since the Ema was made; make a new Ema after layers were added or "
                  "replaced");
      known.erase(found);
    }
  };
  look_at(module->named_parameters());
  look_at(module->named_buffers());
  TORCH_CHECK(known.empty(), operation, ": the module no longer has `", known.begin()->first,
              "`, which it had when the Ema was made; make a new Ema after layers were removed");
}

void Ema::check_weights(const char* operation) const {
  if (all_shared_weights().empty()) return;
  std::vector<at::Tensor> live;
  for (const Tracked& tracked : tracked_) live.push_back(tracked.live);
  const std::string trouble = trouble_of(shared_weights_in(storages_of(live)));
  if (!trouble.empty()) throw Error(std::string(operation) + ": " + trouble);
}

void Ema::update() {
  check_not_swapped("update()");
  check_weights("Ema::update()");
  const auto module = module_.lock();
  if (module != nullptr && (updates_ == 0 || watch_->is_edited())) {
    check_covers_module("Ema::update()");
    watch_->remember(*module);  // unchanged until the first update, or by an edit of layers without parameters
  }
  at::NoGradGuard no_grad;
  ++updates_;
  if (watch_)
    note_in_use({.object = watch_.get(),
                 .life = watch_,
                 .name = "an Ema that the training updates",
                 .line = "checkpointer.add(\"ema\", ema)"});
  before_first_update_.reset();
  std::vector<at::Tensor> live;
  for (const Tracked& tracked : tracked_)
    if (!tracked.averages.empty()) live.push_back(tracked.live.detach().to(tracked.averages.front().scalar_type()));
  if (live.empty()) return;
  for (size_t i = 0; i < options_.decays.size(); ++i) {
    std::vector<at::Tensor> averages;
    for (const Tracked& tracked : tracked_)
      if (!tracked.averages.empty()) averages.push_back(tracked.averages[i]);
    at::_foreach_lerp_(averages, live, 1 - decay_at(options_.decays[i], updates_));
  }
}

void Ema::check_place(size_t which) const {
  TORCH_CHECK(which < options_.decays.size(), "Ema: there is no average ", which, " of ", options_.decays.size(),
              " decays; they count from 0");
}

void Ema::check_not_swapped(const char* operation) const {
  TORCH_CHECK(!swapped_, operation,
              " while the model has the averaged weights; destroy the guard of averaged_weights() first");
}

StateDict Ema::averaged_state(size_t which) const {
  check_place(which);
  check_covers_module("Ema::averaged_state()");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> copies;  // tensors that share memory share it again
  for (const Tracked& tracked : tracked_) {
    const at::Tensor& from = tracked.averages.empty() ? tracked.live : tracked.averages[which];
    copies.push_back(from.detach().to(tracked.live.scalar_type(), /*non_blocking=*/false, /*copy=*/true));
  }
  StateDict state;
  for (const auto& [name, place] : names_) state.insert(name, copies[place]);
  return state;
}

Ema::Guard Ema::averaged_weights(size_t which) {
  check_place(which);
  check_not_swapped("averaged_weights()");
  check_covers_module("Ema::averaged_weights()");
  for (const Tracked& tracked : tracked_)
    TORCH_CHECK(!is_owned_together(tracked.live),
                "averaged_weights(): the weights lie in memory that all ranks share, so each rank would swap them for "
                "the others; load averaged_state() into another module, or make the ZeroRedundancyOptimizer with "
                "shared_parameters = false");
  check_weights("Ema::averaged_weights()");
  return Guard(*this, which);
}

Ema::Guard::Guard(Ema& ema, size_t which) : ema_(ema) {
  at::NoGradGuard no_grad;
  for (const Tracked& tracked : ema.tracked_) {
    if (tracked.averages.empty()) continue;
    own_.emplace_back(tracked.live, tracked.live.detach().clone());
    storages_.push_back(tracked.live.storage().unsafeGetStorageImpl());
  }
  note_borrowed(storages_);
  ema_.swapped_ = true;
  note_weights_set({});
  for (const Tracked& tracked : ema.tracked_)
    if (!tracked.averages.empty()) at::Tensor(tracked.live).copy_(tracked.averages[which]);
}

Ema::Guard::~Guard() {
  at::NoGradGuard no_grad;
  note_weights_set({});
  for (const auto& [live, held] : own_) at::Tensor(live).copy_(held);
  note_given_back(storages_);
  ema_.swapped_ = false;
}

c10::IValue Ema::state_dict() const {
  note_kept(watch_.get());
  check_not_swapped("state_dict()");
  check_covers_module("Ema::state_dict()");
  c10::impl::GenericList decays(c10::AnyType::get()), averages(c10::AnyType::get());
  for (size_t i = 0; i < options_.decays.size(); ++i) {
    StateDict state;
    for (const auto& [name, place] : names_)
      if (!tracked_[place].averages.empty()) state.insert(name, tracked_[place].averages[i]);
    decays.push_back(options_.decays[i]);
    averages.push_back(to_object(state));
  }
  Object state(c10::AnyType::get(), c10::AnyType::get());
  state.insert(std::string("updates"), updates_);
  state.insert(std::string("decays"), decays);
  state.insert(std::string("averages"), averages);
  return state;
}

void Ema::load_state_dict(const c10::IValue& object) {
  check_not_swapped("load_state_dict()");
  check_covers_module("Ema::load_state_dict()");
  if (!object.isGenericDict()) throw Error("the state of the averages must be a dictionary");
  const Object state = object.toGenericDict();
  const c10::IValue updates = ema_entry(state, "updates");
  if (!updates.isInt() || updates.toInt() < 0) throw Error("the state of the averages has no number of `updates`");
  std::vector<double> decays;
  for (const c10::IValue& decay : list_of(state, "decays")) {
    if (!decay.isDouble() && !decay.isInt())
      throw Error("the state of the averages: `decays` is not a list of numbers");
    decays.push_back(decay.toScalar().toDouble());
  }
  if (decays != options_.decays)
    throw Error("the state has averages with the decays " + text_of(at::ArrayRef<double>(decays)) + ", not of " +
                text_of(at::ArrayRef<double>(options_.decays)));
  const auto given = list_of(state, "averages");
  std::vector<StateDict> averages;
  std::string problems;
  for (size_t i = 0; i < given.size() && i < decays.size(); ++i) {
    averages.push_back(to_state_dict(given[i]));
    std::vector<std::pair<std::string, at::Tensor>> own;
    for (const auto& [name, place] : names_)
      if (!tracked_[place].averages.empty()) own.emplace_back(name, tracked_[place].averages[i]);
    compare(averages.back(), own, " (decay " + text_of(decays[i]) + ")", problems);
  }
  if (averages.size() != decays.size()) problems += "\n  the numbers of averages and decays differ";
  if (!problems.empty()) throw Error("the averages do not fit the model:" + problems);
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < averages.size(); ++i)
    for (const auto& [name, place] : names_)
      if (!tracked_[place].averages.empty()) tracked_[place].averages[i].copy_(averages[i][name]);
  updates_ = updates.toInt();
  note_kept(watch_.get());
  before_first_update_.reset();
}

}  // namespace lockstep
