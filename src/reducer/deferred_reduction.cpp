#include "reducer/deferred_reduction.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/rank_agreement.h"

namespace lockstep {

void DeferredReduction::reach(Stage stage) {
  stage_ = stage;
  stage_of_ = parts_.sender.begun();
}

void DeferredReduction::set_aside_passes() {
  passes_ += parts_.passes.since_reduction;
  parts_.passes.note_reduction();
  changes_.remember();
}

void DeferredReduction::begin() {
  was_settled_ = is_settled();
  if (passes_ == 0) return begin_reduction(parts_);
  // Gradients are added to those that wait for the step. Passes that have accumulated since have no marks of their own.
  const std::string change = parts_.passes.since_reduction == 0 ? changes_.found_between_passes() : "";
  parts_.sender.begin();
  parts_.message.note_trouble(change);  // settle() reports this, and the findings of earlier passes
  if (parts_.equipment.timeline) parts_.equipment.timeline->begin(parts_.buckets.size());
}

void DeferredReduction::backward_begins() {
  // For instance between clip_grad_norm() and step(): that thread's settlement would be lost.
  if (was_settled_ && parts_.plan.on_cpu() && settled_by_ != std::this_thread::get_id())
    parts_.message.set_lasting_trouble(kBesideStep);
  skips_ = false;
}

void DeferredReduction::before_gradient(size_t parameter) {
  if (parts_.plan.rank_zero_adds_it() && parts_.plan.has_buckets()) parts_.buckets.slot_of(parameter).forget_reduced();
}

void DeferredReduction::ready(size_t parameter) {
  if (!parts_.backward.reduces) return;
  if (!parts_.plan.has_buckets()) {
    if (parts_.equipment.watch) parts_.equipment.watch->look(parameter, parts_.plan.tensors[parameter].grad());
    return;
  }
  parts_.backward.look_whether_nested();
  parts_.buckets.fill(parameter, /*used=*/true);
}

void DeferredReduction::backward_ended() {
  if (parts_.backward.reduces) set_aside_passes();
}

void DeferredReduction::reduce() {
  begin();
  // Within join() this rank's inputs may have ended within an accumulation.
  compares_passes_ = compares_passes_ && !parts_.message.facts().joining;
  set_aside_passes();
}

void DeferredReduction::skip() {
  begin();
  parts_.message.forget_trouble();
  if (parts_.equipment.watch) parts_.equipment.watch->begin();
  parts_.backward.phase = Backward::Phase::kIdle;
  skips_ = true;
  // Counts as many passes as the others run, in case no step comes before the next backward.
  parts_.passes.since_reduction = std::max(parts_.passes.reduce_every(), 1);
  set_aside_passes();
  drop_gradients(parts_.plan.tensors);
}

std::optional<std::vector<Facts>> DeferredReduction::shadow() {
  begin();
  return std::nullopt;
}

void DeferredReduction::fail(const std::string& trouble) {
  begin();
  parts_.message.set_trouble(trouble);
  settle(Share::kGradients);
}

void DeferredReduction::take_over_from(const DeferredReduction& before) {
  passes_ = before.passes_;
  compares_passes_ = before.compares_passes_;
  changes_.remember();
}

std::vector<bool> DeferredReduction::fill_buckets() {
  Buckets& buckets = parts_.buckets;
  const size_t parameters = parts_.plan.tensors.size();
  const bool contributes = parts_.message.facts().took_part();
  if (!contributes) buckets.fill_with_zeros(/*begin=*/0);
  for (size_t i = 0; i < parameters && contributes && parts_.plan.has_buckets(); ++i) {
    GradientSlot& slot = buckets.slot_of(i);
    if (slot.is_current()) continue;  // otherwise there is none, or the user has replaced or dropped it
    if (!parts_.backward.reached[i] && parts_.plan.rank_zero_adds_it()) slot.forget_reduced();
    buckets.fill(i, parts_.plan.tensors[i].grad().defined());
  }
  for (size_t b = 0; b < buckets.size(); ++b) buckets[b].order_after_fills();
  for (size_t b = 0; b < buckets.size(); ++b) buckets.apply_weight(buckets[b]);
  std::vector<bool> used;
  for (size_t i = 0; i < parameters; ++i)
    used.push_back(parts_.plan.has_buckets() ? buckets.slot_of(i).is_used()
                                             : contributes && parts_.plan.tensors[i].grad().defined());
  return used;
}

std::vector<float> DeferredReduction::tell_all_ranks(Settlement& settlement, const std::vector<bool>& dropped) {
  constexpr float kOneDropped = GradientChanges::kOneDropped;
  const Group& group = parts_.plan.group;
  const auto& timeline = parts_.equipment.timeline;
  const auto parameters = static_cast<int64_t>(settlement.used.size());
  const at::Tensor told = at::zeros({parameters + group.world_size() * kFactElements}, at::kFloat);
  auto* flags = told.data_ptr<float>();
  for (size_t i = 0; i < settlement.used.size(); ++i) flags[i] = settlement.used[i] ? 1 : dropped[i] ? kOneDropped : 0;
  const at::Tensor facts = told.narrow(0, parameters, told.numel() - parameters);
  parts_.message.write_row(facts);
  const auto start = Clock::now();
  for (size_t b = 0; timeline && b < parts_.buckets.size(); ++b) timeline->sent(b);
  if (timeline) timeline->waits();
  const bool clips = OperationLabel::current() == kClipGradNorm;
  const OperationLabel label(clips ? kClipGradNorm : "what the ranks tell each other before an optimizer's step");
  try {
    group.all_reduce(told);
  } catch (const Error& error) {
    if (!group.is_open()) throw;
    throw Error(std::string(clips ? "clip_grad_norm()" : "an optimizer's step") + " could not begin: " + error.what() +
                (clips ? "\nEvery rank must call clip_grad_norm() before the same steps, and take as many steps; "
                       : "\nEvery rank must take the same number of steps; ") +
                advice_on_numbers(parts_.message.facts().joining) + " (this was step " +
                std::to_string(parts_.message.reductions() + 1) + " of this rank).");
  }
  for (size_t b = 0; timeline && b < parts_.buckets.size(); ++b) timeline->done(b);
  parts_.sender.add_waited_seconds(seconds_since(start));
  settlement.ranks = read_facts(facts, /*averaged=*/false);
  std::vector<float> totals(flags, flags + parameters);
  for (size_t i = 0; i < totals.size(); ++i) settlement.used[i] = std::fmod(totals[i], kOneDropped) > 0;
  return totals;
}

void DeferredReduction::check_same_step(const std::vector<Facts>& ranks) const {
  const std::vector<int> passes = compared_passes(ranks);
  const int first = *std::max_element(passes.begin(), passes.end());
  for (const int other : passes)
    if (other != -1 && other != first)
      throw Error(
          "the ranks reached this optimizer's step with different numbers of backward passes since their last step: " +
          std::to_string(other) + " on " + ranks_with(passes, other) + " and " + std::to_string(first) + " on " +
          ranks_with(passes, first) + ". A step was left out on " + ranks_with(passes, first) +
          ", or they ran more backward passes. Call step() on every rank after the same passes, with no_sync() or "
          "accumulate() around the same ones; a rank that has nothing to contribute calls skip_step() in place of its "
          "backward, and then step()");
  std::vector<bool> idle, busy;
  for (const Facts& facts : ranks) {
    idle.push_back(facts.took_part() && facts.idle);
    busy.push_back(facts.took_part() && !facts.idle);
  }
  const auto any = [](const std::vector<bool>& of) { return std::find(of.begin(), of.end(), true) != of.end(); };
  if (any(idle) && any(busy))
    throw Error("an optimizer's step: since the last step no backward ran on " + rank_names(idle) +
                ", but some did on " + rank_names(busy) +
                "; every rank must run the same number of backward passes. A rank that has nothing to contribute calls "
                "skip_step() in place of its backward; " +
                advice_on_numbers(parts_.message.facts().joining));
}

void DeferredReduction::check_reached(const Settlement& settlement) const {
  const auto idle = [](const Facts& facts) { return facts.took_part() && facts.idle; };
  if (!parts_.plan.settings.list || !std::all_of(settlement.ranks.begin(), settlement.ranks.end(), idle) ||
      std::find(settlement.used.begin(), settlement.used.end(), true) != settlement.used.end())
    return;
  throw Error(
      "an optimizer's step: since the last step no backward has reached a parameter of the list that "
      "DistributedDataParallel follows (" +
      parts_.plan.names.front() + (parts_.plan.names.size() > 1 ? ", ..." : "") +
      ") on any rank. If other tensors have taken their places, call refresh() with those on all ranks and make the "
      "optimizer from them; otherwise do not step without gradients");
}

Settlement DeferredReduction::settle(Share share) {
  at::NoGradGuard no_grad;
  RankMessage& message = parts_.message;
  if (is_in_backward_elsewhere(parts_)) message.set_lasting_trouble(kBesideStep);
  parts_.backward.phase = Backward::Phase::kIdle;
  const bool idle = stage() != Stage::kBegun;  // a step without a backward
  if (idle) begin();
  if (std::exchange(skips_, false) && share == Share::kGradients) share = Share::kSkipped;
  if (share == Share::kGradients && parts_.events.reducing) parts_.events.reducing();
  std::vector<bool> dropped(parts_.plan.tensors.size());
  if (passes_ > 0 && parts_.passes.since_reduction == 0 && share == Share::kGradients && message.trouble().empty()) {
    message.set_trouble(changes_.found());
    dropped = changes_.dropped();
  }
  set_aside_passes();
  message.prepare(share, std::exchange(compares_passes_, true) ? passes_ : 0, /*spoiled=*/false, parts_.events);
  message.facts().idle = idle;
  Settlement settlement;
  settlement.used = fill_buckets();
  message.facts().trouble = !message.trouble().empty();
  settlement.ranks = {message.facts()};
  std::vector<float> totals;
  if (parts_.plan.group.world_size() > 1) totals = tell_all_ranks(settlement, dropped);
  passes_ = 0;
  parts_.backward.forget_reached();
  parts_.agreement.check(settlement.ranks);
  check_same_step(settlement.ranks);
  changes_.check_dropped(totals, dropped);
  check_reached(settlement);
  message.count_reduction();
  settlement.divisor = parts_.plan.averages() ? parts_.plan.group.world_size() : 1;
  if (parts_.plan.has_buckets())
    settlement.factor = parts_.agreement.factor(settlement.ranks);  // a rank alone has no weight
  settlement.is_void = std::none_of(settlement.ranks.begin(), settlement.ranks.end(), std::mem_fn(&Facts::took_part));
  const auto& watch = parts_.equipment.watch;
  if (is_void(settlement.ranks)) {
    settlement.is_void = true;
    drop_gradients(parts_.plan.tensors);
  } else if (watch && watch->policy() != NonFinitePolicy::kIgnore && parts_.agreement.drop_non_finite(*watch)) {
    settlement.is_void = true;
  }
  reach(Stage::kSettled);
  settled_by_ = std::this_thread::get_id();
  return settlement;
}

void DeferredReduction::end_step(const Settlement& settlement, bool others_read) {
  if (others_read && parts_.plan.group.world_size() > 1) {
    const OperationLabel label("the end of an optimizer's step");
    parts_.plan.group.barrier();
  }
  reach(Stage::kEnded);
  // Gradients of a rank that did not take part belong to no step, and weighted gradients are no longer the rank's own.
  if (!parts_.message.facts().took_part() || (parts_.message.weight() != 1 && parts_.plan.has_buckets()))
    drop_gradients(parts_.plan.tensors);
  parts_.buckets.reset();
  own_page().count_step();
  parts_.events.reduced(settlement.ranks);
  if (parts_.equipment.timeline) parts_.equipment.timeline->end(parts_.plan.group);
}

}  // namespace lockstep
