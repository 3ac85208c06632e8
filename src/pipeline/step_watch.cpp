#include "pipeline/step_watch.h"

#include "reducer/gradient_marks.h"

namespace lockstep {
namespace {

bool is_zero(const at::Tensor& gradient) { return !gradient.any().item<bool>(); }

}  // namespace

StepWatch::StepWatch(const torch::nn::Module& layers) {
  for (const auto& item : layers.named_parameters())
    if (item.value().defined() && item.value().requires_grad())
      marked_.push_back({.name = item.key(), .parameter = item.value()});
}

void StepWatch::mark() {
  is_marked_ = true;
  for (Marked& one : marked_) {
    one.value = mark_of(one.parameter);
    one.gradient = one.parameter.grad();
    if (!one.gradient.defined()) continue;
    one.gradient_value = mark_of(one.gradient);
    one.version = one.gradient._version();
  }
}

void StepWatch::release() {
  for (Marked& one : marked_) one.gradient.reset();
}

StepWatch::Done StepWatch::since_mark() const {
  Done done;
  if (!is_marked_) return done;
  bool stepped = false, kept = false, had = false;
  for (const Marked& one : marked_) {
    stepped = stepped || mark_of(one.parameter) != one.value;
    if (!one.gradient.defined()) continue;
    had = true;
    const bool changed = mark_of(one.gradient) != one.gradient_value;
    const bool zeroed = changed && is_zero(one.gradient);
    kept = kept || (one.parameter.grad().defined() && !zeroed);
    // zero_grad(false) writes once; a value written before that was not zero.
    const bool regraded = zeroed ? one.gradient._version() > one.version + 1 : changed;
    if (regraded && done.regraded.empty()) done.regraded = one.name;
  }
  // No step has used them, as when a stage was run by hand.
  if (!stepped && !kept) done.regraded.clear();
  (stepped ? done.stepped.yes : done.stepped.no) = true;
  if (had) (kept ? done.cleared.no : done.cleared.yes) = true;
  return done;
}

}  // namespace lockstep
