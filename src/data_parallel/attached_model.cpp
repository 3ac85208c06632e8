#include "data_parallel/attached_model.h"

#include <algorithm>
#include <utility>

#include <ATen/ATen.h>

#include "base/hash.h"

namespace lockstep {
namespace {

std::string refresh_advice(const char* kind, const std::string& name, const char* what) {
  return c10::str(kind, " ", name, " ", what, " after DistributedDataParallel attached; call refresh() on all ranks");
}

/// The first tensor of `now` that is not in `before`, else the first of `before` that is gone; "" if they hold the same
/// tensors.
std::string edit_of(const char* kind, const NamedTensors& before, const NamedTensors& now) {
  const auto holds = [](const NamedTensors& list, const at::Tensor& tensor) {
    return std::any_of(list.begin(), list.end(), [&](const auto& named) { return named.second.is_same(tensor); });
  };
  for (const auto& [name, tensor] : now)
    if (!holds(before, tensor)) return refresh_advice(kind, name, "was added or replaced");
  for (const auto& [name, tensor] : before)
    if (!holds(now, tensor)) return refresh_advice(kind, name, "was removed");
  return "";
}

}  // namespace

NamedTensors AttachedModel::without_ignored(NamedTensors tensors) const {
  std::erase_if(tensors, [&](const auto& named) {
    return std::find(ignored_.begin(), ignored_.end(), named.first) != ignored_.end();
  });
  return tensors;
}

void AttachedModel::attach(std::unique_ptr<Source> from, const Tensors& now) {
  std::vector<Known> known;
  std::vector<std::unique_ptr<GradientAlarm>> alarms;
  std::unordered_set<const c10::TensorImpl*> impls;
  for (const auto& [name, tensor] : now.parameters) {
    const auto counted = now.handles.find(tensor.unsafeGetTensorImpl());
    known.push_back({name, tensor, tensor.options(), tensor.numel(), tensor.requires_grad(),
                     counted != now.handles.end() ? counted->second : 0});
    if (!tensor.requires_grad()) alarms.push_back(alarm_on(tensor));
  }
  for (const auto* list : {&now.parameters, &now.buffers})
    for (const auto& [name, tensor] : *list) impls.insert(tensor.unsafeGetTensorImpl());
  const bool first = source_ == nullptr;
  if (from) source_ = std::move(from);
  source_->remember();
  seen_.edited = false;
  strangers_.clear();
  known_ = std::move(known);
  frozen_ = std::move(alarms);
  impls_ = std::move(impls);
  buffers_ = now.buffers;
  if (!first && watches_untrained_) untrained_.refreshed(trained_, now.followed);
  trained_ = now.followed;
}

void AttachedModel::watch_strangers() {
  if (!seen_.edited && !source_->is_edited()) return;
  seen_.edited = true;
  strangers_.clear();
  for (const auto& [name, tensor] : parameters_of(*source_))
    if (!is_known(tensor) && tensor.requires_grad()) strangers_.push_back(alarm_on(tensor));
}

void AttachedModel::expect(const std::vector<at::Tensor>& tensors) {
  seen_.edited = true;
  for (const at::Tensor& tensor : tensors)
    if (!is_known(tensor) && tensor.is_leaf() && tensor.requires_grad()) strangers_.push_back(alarm_on(tensor));
}

std::string AttachedModel::left_behind() const {
  if (!source_->is_list()) return "";
  for (const Known& one : known_)
    if (const size_t handles = one.tensor.use_count();
        one.own_handles != 0 && handles <= one.own_handles + 1 &&
        handles <= one.own_handles + kept_list_.count(one.tensor.unsafeGetTensorImpl()))
      return "parameter " + one.name +
             " of the list that DistributedDataParallel follows is no longer held by anything else, so another tensor "
             "has taken its place; call refresh() with the current list on all ranks, or destroy the "
             "DistributedDataParallel";
  return "";
}

void AttachedModel::set_kept_list(const NamedTensors* list) {
  if (list == nullptr) return kept_list_.clear();
  for (const auto& [name, tensor] : *list) kept_list_.insert(tensor.unsafeGetTensorImpl());
}

std::vector<std::string> AttachedModel::frozen_names() const {
  std::vector<std::string> names;
  for (const Known& one : known_)
    if (one.followed && !one.tensor.requires_grad()) names.push_back(one.name);
  return names;
}

std::string AttachedModel::inspect() {
  if (left_)
    if (std::string trouble = left_->trouble(); !trouble.empty()) return trouble;
  if (std::string gone = left_behind(); !gone.empty()) return gone;
  seen_.frozen = 0;
  for (const Known& one : known_) {
    if (const bool trains = one.tensor.requires_grad(); trains != one.followed) {
      if (trains) return refresh_advice("parameter", one.name, "was unfrozen");
      const uint64_t before = seen_.frozen == 0 ? Hash::kStart : seen_.frozen;
      seen_.frozen = Hash::mixed(before, static_cast<uint64_t>(&one - known_.data()));
    }
    if (one.tensor.scalar_type() != one.options.dtype() || one.tensor.device() != one.options.device())
      return refresh_advice("parameter", one.name, "was converted");
    if (one.tensor.numel() != one.elements) return refresh_advice("parameter", one.name, "was resized");
  }
  if (!seen_.edited && !source_->is_edited()) return "";
  seen_.edited = true;
  NamedTensors parameters;
  for (const Known& one : known_) parameters.emplace_back(one.name, one.tensor);
  std::string edit = edit_of("parameter", parameters, parameters_of(*source_));
  if (edit.empty()) edit = edit_of("buffer", buffers_, buffers_of(*source_));
  if (edit.empty()) {  // only layers without tensors were added or removed, or nothing changed
    source_->remember();
    seen_.edited = false;
    strangers_.clear();
  }
  return edit;
}

}  // namespace lockstep
