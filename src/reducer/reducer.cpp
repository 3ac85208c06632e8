#include "reducer/reducer.h"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

constexpr const char* kNothingForAHook =
    "an optimizer that sums gradients itself sends no buckets, so a communication hook would have no effect; remove "
    "the hook, or use another optimizer";

std::unique_ptr<VirtualReduction> virtual_reduction(ReductionParts& parts) {
  auto ranks = several_virtual_ranks(parts.plan.group);
  return ranks ? std::make_unique<VirtualReduction>(parts, std::move(ranks)) : nullptr;
}

}  // namespace

Reducer::Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events)
    : parts_(parameters, std::move(group), settings, passes, std::move(events)),
      virtual_(virtual_reduction(parts_)),
      tracker_(parts_, in_backward(), [this] { return entered_.objection(); }),
      entered_(parts_.plan.group, [this](std::optional<int> left) {
        const MutexLock lock(tracker_.mutex);
        if (virtual_) virtual_->left(left);
      }) {}

Reduction& Reducer::in_backward() {
  if (virtual_) return *virtual_;
  return overlapped_;
}

void Reducer::equip(Equipment equipment) {
  const MutexLock lock(tracker_.mutex);
  TORCH_CHECK(step_ == nullptr || !equipment.hook, kNothingForAHook);
  entered_.check(equipment.hook.get());
  parts_.message.facts().policy = equipment.watch ? equipment.watch->policy() : NonFinitePolicy::kIgnore;
  parts_.equipment = std::move(equipment);
  in_backward().equipment_changed();
}

void Reducer::defer_to(SharedStep* step) {
  const MutexLock lock(tracker_.mutex);
  TORCH_CHECK(step == nullptr || !parts_.equipment.hook, kNothingForAHook);
  TORCH_CHECK(step == nullptr || !virtual_,
              "a rank works for several virtual ranks, whose gradients are added in backward; an optimizer cannot sum "
              "them in its step");
  step_ = step;
  if (step == nullptr) return tracker_.drive(in_backward());
  if (!deferred_) deferred_ = std::make_unique<DeferredReduction>(parts_);
  tracker_.drive(*deferred_);
}

void Reducer::set_weight(double weight) {
  const MutexLock lock(tracker_.mutex);
  parts_.message.facts().weight = weight;
}

void Reducer::set_joining(bool joining, bool divide_by_active) {
  const MutexLock lock(tracker_.mutex);
  parts_.message.set_joining(joining, divide_by_active);
}

void Reducer::take_over_from(const Reducer& before) {
  const MutexLock theirs(before.tracker_.mutex);
  const MutexLock lock(tracker_.mutex);
  parts_.message.take_over_from(before.parts_.message);
  parts_.sender.add_waited_seconds(before.parts_.sender.waited_seconds());
  step_ = before.step_;
  if (parts_.plan.has_buckets())
    for (size_t i = 0; i < parts_.plan.places.size(); ++i)
      parts_.buckets.slot_of(i).adopt(/*reduced=*/step_ == nullptr);
  if (!before.deferred_) return;
  deferred_ = std::make_unique<DeferredReduction>(parts_);
  deferred_->take_over_from(*before.deferred_);
  if (step_ != nullptr) tracker_.drive(*deferred_);
}

void Reducer::reduce() {
  const MutexLock lock(tracker_.mutex);
  tracker_.look_for_early_step();
  tracker_.reduction().reduce();
  parts_.record.mark(parts_.plan.tensors);
}

void Reducer::skip() {
  const MutexLock lock(tracker_.mutex);
  if (!virtual_)
    parts_.record.forget();
  else if (parts_.passes.since_reduction == 0)  // otherwise other shares of the step may have gradients
    parts_.record.forget_cleared(parts_.plan.tensors);
  tracker_.reduction().skip();
  parts_.record.mark(parts_.plan.tensors);
}

int Reducer::drop_kept_back() {
  const MutexLock lock(tracker_.mutex);
  const int passes = virtual_ ? virtual_->accumulating() : parts_.passes.counted;
  const int dropped = passes > 0 && !gradients_are_gone(parts_.plan.tensors) ? passes : 0;
  if (!virtual_ && parts_.passes.since_reduction > 0) {
    drop_gradients(parts_.plan.tensors);
    parts_.early_step.forget();
  }
  return dropped;
}

std::vector<Facts> Reducer::shadow() {
  SharedStep* step = nullptr;
  {
    const MutexLock lock(tracker_.mutex);
    parts_.record.forget();
    if (auto ranks = tracker_.reduction().shadow()) return *std::move(ranks);
    step = step_;
  }
  return step->step_without_inputs();
}

void Reducer::fail(const std::string& trouble) {
  const MutexLock lock(tracker_.mutex);
  tracker_.reduction().fail(trouble);
}

Settlement Reducer::settle(Share share) {
  const MutexLock lock(tracker_.mutex);
  TORCH_INTERNAL_ASSERT(deferred_, "nobody takes the sum of gradients");
  return deferred_->settle(share);
}

bool Reducer::is_settled() const {
  const MutexLock lock(tracker_.mutex);
  return deferred_ && deferred_->is_settled();
}

void Reducer::end_step(const Settlement& settlement, bool others_read) {
  const MutexLock lock(tracker_.mutex);
  deferred_->end_step(settlement, others_read);
}

bool Reducer::has_scaled_gradients() const {
  const MutexLock lock(tracker_.mutex);
  return parts_.record.still_scaled(parts_.plan.tensors, nullptr);
}

bool Reducer::has_gradients_scaled_by(const ScaledPasses& scaled) const {
  const MutexLock lock(tracker_.mutex);
  return parts_.record.still_scaled_by(scaled, parts_.plan.tensors);
}

std::string Reducer::stepped_beside_scaler() const {
  const MutexLock lock(tracker_.mutex);
  const auto found = parts_.record.stepped_beside(parts_.plan.tensors);
  return found ? parts_.plan.names[*found] : "";
}

void Reducer::accept_changes(const TensorSet& parameters) {
  const MutexLock lock(tracker_.mutex);
  parts_.record.unscaled(parts_.plan.tensors, parameters);
  if (step_ != nullptr && parameters.contains(parts_.plan.tensors.front().unsafeGetTensorImpl()))
    deferred_->changes().remember();
}

std::optional<KnownGradients> Reducer::known_gradients(const TensorSet& parameters) const {
  const MutexLock lock(tracker_.mutex);
  const ReductionPlan& plan = parts_.plan;
  const auto first = plan.first_of(parameters);
  if (!first) return std::nullopt;
  const Facts& facts = parts_.message.facts();
  const int waiting = parts_.passes.since_reduction;
  KnownGradients known{.passes = parts_.record.passes(plan.tensors, parameters),
                       .edits = parts_.record.edits(plan.tensors, parameters)};
  if (known.edits.changed) known.edits.changed_name = plan.names[*known.edits.changed];
  if (known.edits.stepped) known.edits.stepped_name = plan.names[*known.edits.stepped];
  known.identity = Hash::mixed(static_cast<uint64_t>(plan.settings.object), *first + 1);
  known.first_name = plan.names[*first];
  known.drops = facts.policy == NonFinitePolicy::kSkip;
  if (virtual_ && parts_.passes.reduce_every() > 0) known.shares = waiting;
  if (plan.group.world_size() > 1 && !facts.joining && waiting == 0) known.ranks = plan.group;
  if (waiting > 0 && parts_.backward.accumulates) known.held_back = waiting;
  if (virtual_) {  // each of a step's shares may have skipped
    known.contributed = !known.passes.empty();
    known.absent = waiting == 0 && parts_.last_is_void;
  } else if (step_ != nullptr) {
    known.contributed = waiting > 0 || deferred_->gradients_wait();
    known.absent = waiting == 0 && (deferred_->skips() || !facts.active);
    known.settled = deferred_->is_settled();
  } else {
    known.contributed = waiting > 0 || (facts.took_part() && parts_.message.reductions() > 0);
    known.absent = waiting == 0 && !facts.took_part();
  }
  return known;
}

}  // namespace lockstep
