#include "reducer/backward_tracker.h"

#include <utility>

#include <ATen/ATen.h>

#include "base/text.h"

namespace lockstep {
namespace {

constexpr const char* kTwoThreads =
    "was reached by the backward of one thread while that of another was still running; let one thread at a time run "
    "backward of a model, or give each thread a model of its own";

constexpr size_t kNotedAtMost = 32;

/// By parameter: 1 if it is on the CPU, so small that 32 of them fit the second-level cache, and not the last of its
/// bucket. With the last one, the bucket is full, as a rule, and is sent at once.
std::vector<uint8_t> those_that_wait(const ReductionPlan& plan) {
  constexpr size_t kSmall = 8 << 10;
  std::vector<uint8_t> wait;
  for (const at::Tensor& parameter : plan.tensors)
    wait.push_back(parameter.is_cpu() && parameter.nbytes() <= kSmall ? 1 : 0);
  for (const auto& bucket : plan.buckets) wait[bucket.back()] = 0;
  return wait;
}

}  // namespace

BackwardTracker::BackwardTracker(ReductionParts& parts, Reduction& reduction, std::function<std::string()> objection)
    : parts_(parts), reduction_(&reduction), objection_(std::move(objection)), waits_(those_that_wait(parts.plan)) {
  noted_.reserve(kNotedAtMost);
  for (size_t i = 0; i < parts.plan.tensors.size(); ++i) follow(i, parts.plan.tensors[i]);
}

void BackwardTracker::follow(size_t parameter, const at::Tensor& tensor) {
  GradientEvents events{.before = [this, parameter] { before_gradient(parameter); },
                        .accumulated = [this, parameter](bool any) { accumulated(parameter, any); },
                        .captured = [this] { captured(); }};
  hooks_.push_back(std::make_unique<GradientHook>(tensor, std::move(events)));
}

void BackwardTracker::before_gradient(size_t parameter) {
  const bool beside = is_stepped_elsewhere();  // the step may end while this waits for the mutex
  if (!beside && is_in_quiet_backward()) return;
  const MutexLock lock(mutex);
  if (beside || is_stepped_elsewhere()) {
    parts_.message.set_lasting_trouble(kBesideStep);
    TORCH_CHECK(false, kBesideStep);
  }
  if (parts_.backward.phase != Backward::Phase::kInBackward) begin_backward();
  check_thread(parameter);
  reduction_->before_gradient(parameter);
}

void BackwardTracker::accumulated(size_t parameter, bool any) {
  if (any && waits_[parameter] != 0 && is_in_quiet_backward() && is_in_outermost_backward()) {
    noted_.push_back(parameter);
    if (noted_.size() < kNotedAtMost) return;
    const MutexLock lock(mutex);
    return report_noted();
  }
  const MutexLock lock(mutex);
  if (parts_.backward.phase != Backward::Phase::kInBackward) begin_backward();
  check_thread(parameter);
  if (!any) return;
  if (is_in_quiet_backward()) report_noted();
  report(parameter);
}

void BackwardTracker::report_noted() {
  for (size_t i = 0; i < noted_.size(); ++i) report(noted_[i]);
  noted_.clear();
}

void BackwardTracker::report(size_t parameter) {
  reached(parameter);
  reduction_->ready(parameter);
}

void BackwardTracker::reached(size_t parameter) {
  // Autograd's zeros have no memory, but all code that inspects a gradient reads it.
  const at::Tensor& tensor = parts_.plan.tensors[parameter];
  if (const at::Tensor& gradient = tensor.grad(); gradient.defined() && gradient._is_zerotensor())
    tensor.mutable_grad() = at::zeros(gradient.sizes(), gradient.options());
  parts_.backward.reached[parameter] = true;
  parts_.record.reached(parameter);
}

void BackwardTracker::captured() {
  {
    const MutexLock lock(mutex);
    if (parts_.passes.reduce_every() == 0 || parts_.backward.captured == current_backward()) return;
    parts_.backward.captured = current_backward();
  }
  at_end_of_backward([](bool nested) {
    TORCH_CHECK(nested,
                "autograd::grad with respect to a parameter that DistributedDataParallel follows returns this rank's "
                "own gradient, which is not reduced; hold a no_sync() guard if you want that, or call backward()");
  });
}

void BackwardTracker::note_unfollowed_backward() {
  const MutexLock lock(mutex);
  if (parts_.backward.phase != Backward::Phase::kInBackward) begin_backward();
}

void BackwardTracker::begin_backward() {
  const BackwardPasses& passes = parts_.passes;
  Backward& backward = parts_.backward;
  if (parts_.events.backward_begins)
    if (const std::string trouble = parts_.events.backward_begins(reduction_->gradients_wait()); !trouble.empty())
      return reduction_->fail(trouble);  // other ranks may not have noticed it
  reduction_->begin();
  parts_.message.note_trouble(objection_());
  if (const auto stepped = parts_.record.stepped_beside(parts_.plan.tensors))
    parts_.message.note_trouble(*stepped, kSteppedBesideScaler);
  look_for_early_step();
  backward.number = current_backward();
  backward.thread = std::this_thread::get_id();
  quiet_ = !reduction_->acts_before_gradients();
  backward.accumulates = passes.reduce_every() > 1;
  backward.reduces = passes.reduces_next();
  // Virtual ranks take a step's gradients out of .grad, one after the other, which does not count as clearing.
  const bool takes_out = !parts_.plan.row_kind.empty() && passes.since_reduction > 0 && passes.reduce_every() > 0;
  if (!takes_out) parts_.record.forget_cleared(parts_.plan.tensors);
  parts_.record.begin(parts_.plan.tensors);
  reduction_->backward_begins();
  backward.phase = Backward::Phase::kInBackward;
  at_end_of_outermost_backward({.finished = [this] { end_backward(); },
                                .nested =
                                    [this] {
                                      const MutexLock lock(mutex);
                                      parts_.backward.is_nested = true;
                                    },
                                .abandoned =
                                    [this, number = backward.number] {
                                      const MutexLock lock(mutex);
                                      Backward& ended = parts_.backward;
                                      if (ended.number != number || ended.phase != Backward::Phase::kInBackward) return;
                                      for (const size_t parameter : noted_) reached(parameter);
                                      noted_.clear();
                                      ended.phase = Backward::Phase::kAbandoned;
                                    }});
}

void BackwardTracker::watch_for_early_step() {
  const bool waits = parts_.passes.since_reduction > 0;
  // A single rank's own gradients are all there are; virtual ranks take theirs out of .grad.
  if (waits && parts_.plan.group.world_size() > 1 && parts_.plan.row_kind.empty())
    parts_.early_step.remember(parts_.plan.tensors, parts_.backward.reached);
  else
    parts_.early_step.forget();
}

std::string BackwardTracker::early_step_text(size_t parameter) const {
  return "parameter " + parts_.plan.names[parameter] +
         " was changed, as optimizer.step() does, while the gradients of " +
         counted(parts_.passes.since_reduction, "backward pass", "backward passes") +
         (parts_.backward.accumulates ? " of accumulate()" : " within no_sync()") +
         " waited in .grad. A step then is by this rank's own gradients, and replicas part unless the program averages "
         "gradients or parameters itself. " +
         (parts_.backward.accumulates
              ? "Step when complete() is true; a backward that only passes through this model runs within no_sync()"
              : "Step after a backward outside no_sync(), which reduces them, or after reduce_gradients(); LocalSGD "
                "and DiLoCo average the parameters of ranks that train apart");
}

void BackwardTracker::look_for_early_step() {
  if (parts_.passes.since_reduction == 0) return;
  const auto stepped = parts_.early_step.found(parts_.plan.tensors);
  if (!stepped) return;
  const std::string text = early_step_text(*stepped);
  parts_.early_step.forget();
  // As long as no backward reduces, no other rank can be told.
  if (!parts_.message.local_step().empty() && !std::exchange(warned_of_local_steps_, true)) TORCH_WARN(text);
  parts_.message.note_local_step(text);
}

BackwardTracker::~BackwardTracker() {
  try {
    const MutexLock lock(mutex);
    if (parts_.passes.since_reduction == 0 || warned_of_local_steps_) return;
    const auto stepped = parts_.early_step.found(parts_.plan.tensors);
    const std::string text = stepped ? early_step_text(*stepped) : parts_.message.local_step();
    if (!text.empty()) TORCH_WARN(text);
  } catch (const std::exception&) {  // NOLINT: from a handler of warnings
  }
}

void BackwardTracker::end_backward() {
  const MutexLock lock(mutex);
  report_noted();
  parts_.backward.phase = Backward::Phase::kIdle;
  parts_.record.end(current_backward());
  parts_.passes.note_pass();
  reduction_->backward_ended();
  parts_.record.mark(parts_.plan.tensors);
  watch_for_early_step();
}

void BackwardTracker::check_thread(size_t parameter) {
  if (parts_.backward.is_of_another_thread() && parts_.plan.tensors[parameter].is_cpu())
    parts_.message.note_trouble(parameter, kTwoThreads);
}

bool BackwardTracker::is_stepped_elsewhere() const {
  const std::thread::id stepper = stepped_by_;
  return stepper != std::thread::id() && stepper != std::this_thread::get_id();
}

bool BackwardTracker::is_backward_elsewhere() const {
  const MutexLock lock(mutex);
  return is_in_backward_elsewhere(parts_);
}

}  // namespace lockstep
