#include "reducer/pass_record.h"

#include <algorithm>
#include <utility>

#include "base/weights_set.h"
#include "reducer/scaled_passes.h"

namespace lockstep {
namespace {

/// More passes without a zero_grad() between them are a mistake.
constexpr size_t kMostPasses = 1024;
/// An optimizer's step changes nearly all of its parameters, so only this many of a pass are compared.
constexpr size_t kMostLookedAt = 32;

/// On a device, where reading waits for queued work, any gradient counts as cleared.
bool is_cleared(const at::Tensor& gradient) {
  static const uint64_t kOfZeros = sample_of(at::zeros({1}));
  return !gradient.defined() || !gradient.is_cpu() || gradient._is_zerotensor() ||
         (gradient.layout() == at::kStrided && sample_of(gradient) == kOfZeros);
}

/// The number of times that weights were set other than from a state that the program gave.
uint64_t times_set_without_state() { return times_weights_were_set() - times_weights_were_loaded(); }

uint64_t mark_of_gradient(const at::Tensor& parameter) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided || gradient._is_zerotensor()) return 0;
  return Hash::mixed(mark_of(gradient), 1);
}

}  // namespace

bool PassRecord::is_cleared_since_mark(const std::vector<at::Tensor>& parameters, size_t i) const {
  const at::Tensor& gradient = parameters[i].grad();
  if (!gradient.defined() || gradient.numel() > 0 || i >= marks_.size()) return is_cleared(gradient);
  return mark_of_gradient(parameters[i]) != marks_[i].gradient;
}

void PassRecord::begin(const std::vector<at::Tensor>& parameters) {
  current_.assign(ScaledPasses::any() ? parameters.size() : 0, false);
  if (current_.empty()) forget();
}

void PassRecord::forget_cleared(const std::vector<at::Tensor>& parameters) {
  if (passes_.empty()) return;
  for (size_t i = 0; i < parameters.size(); ++i)
    for (Pass& pass : passes_)
      if (pass.reached[i] &&
          (pass.unscaled[i] ? is_cleared(parameters[i].grad()) : is_cleared_since_mark(parameters, i)))
        pass.reached[i] = false;
  std::erase_if(passes_, [](const Pass& pass) {
    return std::find(pass.reached.begin(), pass.reached.end(), true) == pass.reached.end();
  });
}

void PassRecord::end(int number) {
  if (current_.empty()) return;
  if (passes_.size() == kMostPasses) passes_.erase(passes_.begin());
  const size_t parameters = current_.size();
  passes_.push_back({number, std::exchange(current_, {}), std::vector<bool>(parameters, false)});
}

void PassRecord::mark(const std::vector<at::Tensor>& parameters) {
  marks_.clear();
  if (passes_.empty()) return;
  weights_set_ = times_weights_were_set();
  set_without_state_ = times_set_without_state();
  for (const at::Tensor& parameter : parameters)
    marks_.push_back({mark_of_gradient(parameter), parameter.is_cpu() ? sample_of(parameter) : 0});
}

void PassRecord::unscaled(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) {
  if (passes_.empty()) return;
  divided_.resize(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!chosen.contains(parameters[i].unsafeGetTensorImpl())) continue;
    divided_[i] = true;
    for (Pass& pass : passes_) pass.unscaled[i] = true;
  }
}

bool PassRecord::still_scaled(const std::vector<at::Tensor>& parameters, const TensorSet* chosen) const {
  for (const Pass& pass : passes_) {
    if (!ScaledPasses::known_to_any(pass.number)) continue;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (pass.reached[i] && !pass.unscaled[i] && !is_cleared_since_mark(parameters, i) &&
          (chosen == nullptr || chosen->contains(parameters[i].unsafeGetTensorImpl())))
        return true;
  }
  return false;
}

bool PassRecord::still_scaled_by(const ScaledPasses& scaled, const std::vector<at::Tensor>& parameters) const {
  for (const Pass& pass : passes_) {
    if (scaled.scale_of(pass.number) != ScaledPasses::Scale::kPresent) continue;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (pass.reached[i] && !pass.unscaled[i] && !is_cleared_since_mark(parameters, i)) return true;
  }
  return false;
}

std::optional<size_t> PassRecord::stepped_beside(const std::vector<at::Tensor>& parameters) const {
  if (marks_.size() != parameters.size() || weights_set_ != times_weights_were_set()) return std::nullopt;
  for (const Pass& pass : passes_) {
    std::vector<size_t> waiting;
    bool any_divided = false;
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (pass.reached[i] && !pass.unscaled[i]) waiting.push_back(i);
      any_divided = any_divided || (pass.reached[i] && pass.unscaled[i]);
    }
    if (waiting.empty() || !ScaledPasses::known_to_any(pass.number)) continue;
    const size_t apart = (waiting.size() + kMostLookedAt - 1) / kMostLookedAt;
    for (size_t at = 0; at < waiting.size(); at += apart) {
      const size_t i = waiting[at];
      if (any_divided && i < divided_.size() && divided_[i]) continue;
      if (parameters[i].is_cpu() && sample_of(parameters[i]) != marks_[i].parameter) return i;
    }
  }
  return std::nullopt;
}

std::vector<RecordedPass> PassRecord::passes(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const {
  std::vector<RecordedPass> found;
  for (const Pass& pass : passes_) {
    bool reached = false, unscaled = true;
    for (size_t i = 0; i < parameters.size(); ++i)
      if (pass.reached[i] && chosen.contains(parameters[i].unsafeGetTensorImpl()) &&
          !(pass.unscaled[i] && is_cleared(parameters[i].grad()))) {
        reached = true;
        unscaled = unscaled && pass.unscaled[i];
      }
    if (reached) found.push_back({pass.number, unscaled});
  }
  return found;
}

GradientEdits PassRecord::edits(const std::vector<at::Tensor>& parameters, const TensorSet& chosen) const {
  GradientEdits edits;
  if (marks_.size() != parameters.size()) return edits;
  std::vector<bool> scaled(parameters.size());
  for (const Pass& pass : passes_) {
    if (!ScaledPasses::known_to_any(pass.number)) continue;
    for (size_t i = 0; i < parameters.size(); ++i) scaled[i] = scaled[i] || (pass.reached[i] && !pass.unscaled[i]);
  }
  const bool weights_are_as_left = weights_set_ == times_weights_were_set(),
             at_most_loaded = set_without_state_ == times_set_without_state();
  bool any_kept = false;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!scaled[i] || !chosen.contains(parameters[i].unsafeGetTensorImpl())) continue;
    edits.any = true;
    const uint64_t now = mark_of_gradient(parameters[i]);
    const bool differs = now != marks_[i].gradient && marks_[i].gradient != 0;
    const bool cleared = differs && (now == 0 || (parameters[i].is_cpu() && is_cleared(parameters[i].grad())));
    edits.cleared = Hash::mixed(edits.cleared, cleared ? 1 : 0);
    edits.cleared_here = edits.cleared_here || cleared;
    any_kept = any_kept || (!cleared && now != 0);
    if (differs && !cleared && !edits.changed) edits.changed = i;
    const bool counts = weights_are_as_left || (at_most_loaded && !cleared);
    if (!edits.stepped && counts && parameters[i].is_cpu() && sample_of(parameters[i]) != marks_[i].parameter)
      edits.stepped = i;
  }
  edits.all_cleared = edits.cleared_here && !any_kept;
  return edits;
}

}  // namespace lockstep
