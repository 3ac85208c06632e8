#include <algorithm>
#include <cmath>
#include <functional>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "base/error.h"
#include "base/rank_names.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"
#include "reducer/reducer.h"
#include "reducer/same_number.h"

// Deferred reduction: backward only fills the buckets, and an optimizer sums them in its step.
//
//   backward    fills buckets; .grad lies in them, this rank's own
//   settle()    fills the rest; one small message carries all ranks' facts and which parameters have gradients.
//               When it returns, every rank's buckets are filled
//   the step    reads all ranks' buckets, or sends the sums round
//   conclude()  a barrier where ranks read the others' buckets: no rank does any more

namespace lockstep {
namespace {

/// What a gradient that was dropped adds to a sum over the ranks, of which there are fewer.
constexpr float kOneDropped = 4096;

}  // namespace

void Reducer::set_aside_passes() {
  backward_.deferred_passes += passes_.since_reduction;
  passes_.since_reduction = 0;
  backward_.marks = marks();
}

std::vector<uint64_t> Reducer::marks() const {
  std::vector<uint64_t> marks(fixed_.places.size());
  for (size_t i = 0; i < marks.size() && !buckets_.empty(); ++i)
    if (const auto [bucket, slot] = fixed_.places[i]; buckets_[bucket].current(slot))
      marks[i] = mark_of(fixed_.tensors[i].grad());
  return marks;
}

void Reducer::accept(const TensorSet& parameters) {
  const MutexLock lock(mutex_);
  if (deferral_ && parameters.contains(fixed_.tensors.front().unsafeGetTensorImpl())) backward_.marks = marks();
}

std::optional<Group> Reducer::ranks_that_reduce(const TensorSet& parameters) const {
  const MutexLock lock(mutex_);
  if (fixed_.group.world_size() == 1 || message_.facts.joining || passes_.since_reduction != 0) return std::nullopt;
  return follows(parameters) ? std::optional(fixed_.group) : std::nullopt;
}

std::optional<bool> Reducer::has_contributed(const TensorSet& parameters) const {
  if (!follows(parameters)) return std::nullopt;
  const MutexLock lock(mutex_);
  if (virtual_) return false;  // of several shares of a step, each may have skipped
  if (passes_.since_reduction > 0) return true;
  return deferral_ ? awaits_step() : message_.facts.took_part() && reductions_ > 0;
}

bool Reducer::follows(const TensorSet& parameters) const {
  return std::any_of(fixed_.tensors.begin(), fixed_.tensors.end(), [&](const at::Tensor& tensor) {
    return parameters.contains(tensor.unsafeGetTensorImpl());
  });
}

std::string Reducer::change_of_gradient(size_t parameter) const {
  constexpr const char* kAdvice =
      " was changed between backward and the step of the ZeroRedundancyOptimizer. There .grad is what this rank alone "
      "has computed, and the mean of what was clipped or scaled on each rank is not the mean, clipped; limit the norm "
      "by model.clip_grad_norm(), which every rank calls, or pass a loss that is scaled";
  const auto [bucket, slot] = fixed_.places[parameter];
  const at::Tensor& gradient = fixed_.tensors[parameter].grad();
  if (!gradient.defined()) return "";  // see dropped_gradients()
  const uint64_t now = buckets_[bucket].current(slot) ? mark_of(gradient) : 0;
  const bool is_changed = now != backward_.marks[parameter] && buckets_[bucket].problem(slot) == nullptr;
  return is_changed ? ".grad of parameter " + fixed_.names[parameter] + kAdvice : "";
}

std::string Reducer::change_of_gradients() const {
  std::string change;
  for (size_t i = 0; i < backward_.marks.size() && !buckets_.empty() && change.empty(); ++i)
    change = change_of_gradient(i);
  return change;
}

std::string Reducer::change_between_passes() const {
  for (size_t i = 0; i < backward_.marks.size() && !buckets_.empty(); ++i) {
    const at::Tensor& tensor = fixed_.tensors[i];
    const std::string change = change_of_gradient(i);
    if (!change.empty() && tensor.grad().any().item<bool>()) return change;  // zeros: a step that was given up
  }
  return "";
}

std::vector<bool> Reducer::dropped_gradients() const {
  std::vector<bool> dropped(fixed_.tensors.size());
  for (size_t i = 0; i < backward_.marks.size(); ++i)
    dropped[i] = backward_.marks[i] != 0 && !fixed_.tensors[i].grad().defined();
  return dropped;
}

void Reducer::judge_dropped(const std::vector<float>& totals, const std::vector<bool>& dropped) const {
  const auto differs = [](float total) { return total >= kOneDropped && std::fmod(total, kOneDropped) > 0; };
  const auto first = std::find_if(totals.begin(), totals.end(), differs);
  if (first == totals.end()) return;
  const OperationLabel label("which gradients were dropped on each rank");
  const auto index = static_cast<size_t>(first - totals.begin());
  const auto told = fixed_.group.all_gather_bytes(dropped[index] ? "dropped" : "");
  throw Error("the gradient of parameter " + fixed_.names[index] + " was dropped on " +
              ranks_with(told, std::string("dropped")) +
              " between backward and the step of the ZeroRedundancyOptimizer, and not on every rank, so the mean would "
              "count it as zeros there. Call zero_grad() after step(), or before backward, on every rank; a rank that "
              "has nothing to contribute calls skip_step() in place of its backward");
}

bool Reducer::awaits_step() const {
  return deferral_ && backward_.deferred_passes > 0 && !backward_.skips;
}

void Reducer::skip_deferred() {
  backward_.phase = Phase::kIdle;
  backward_.skips = true;
  // As many passes as the others run, in case that there is no step before the next backward.
  passes_.since_reduction = std::max(passes_.reduce_every(), 1);
  set_aside_passes();
  drop_gradients();
}

bool Reducer::is_settled() const {
  const MutexLock lock(mutex_);
  return backward_.stage == Stage::kSettled;
}

std::vector<bool> Reducer::fill_deferred() {
  const bool contributes = message_.facts.took_part();
  if (!contributes)
    for (Bucket& bucket : buckets_) bucket.fill_with_zeros();
  for (size_t i = 0; i < fixed_.places.size() && contributes && !buckets_.empty(); ++i) {
    const auto [bucket, slot] = fixed_.places[i];
    if (buckets_[bucket].current(slot)) continue;  // else it has none, or the user has replaced or dropped it
    if (!backward_.used[i] && fixed_.rank_zero_adds_it()) buckets_[bucket].forget_reduced(slot);
    fill(i, fixed_.tensors[i].grad().defined());
  }
  for (Bucket& bucket : buckets_) bucket.order_after_fills();
  if (weight() != 1)
    for (Bucket& bucket : buckets_) weight() == 0 ? bucket.gradients().zero_() : bucket.gradients().mul_(weight());
  std::vector<bool> used;
  for (size_t i = 0; i < fixed_.places.size(); ++i) {
    const auto [bucket, slot] = fixed_.places[i];
    used.push_back(buckets_.empty() ? contributes && fixed_.tensors[i].grad().defined() : buckets_[bucket].used(slot));
  }
  return used;
}

std::vector<float> Reducer::exchange(Settlement& settlement, const std::vector<bool>& dropped) {
  const auto parameters = static_cast<int64_t>(settlement.used.size());
  const at::Tensor said = at::zeros({parameters + fixed_.group.world_size() * kFactElements}, at::kFloat);
  auto* flags = said.data_ptr<float>();
  for (size_t i = 0; i < settlement.used.size(); ++i) flags[i] = settlement.used[i] ? 1 : dropped[i] ? kOneDropped : 0;
  const at::Tensor facts = said.narrow(0, parameters, said.numel() - parameters);
  write_facts(facts, fixed_.group.rank(), message_.facts);
  const auto start = Clock::now();
  for (size_t b = 0; equipment_.timeline && b < buckets_.size(); ++b) equipment_.timeline->launched(b);
  if (equipment_.timeline) equipment_.timeline->waits();
  const OperationLabel label("what the ranks tell each other before an optimizer's step");
  try {
    fixed_.group.all_reduce(said);
  } catch (const Error& error) {
    throw Error(
        std::string("an optimizer's step could not begin: ") + error.what() +
        "\nEvery rank must take the same number of steps; where ranks have different numbers of batches, "
        LOCKSTEP_WITHIN_JOIN " (this was step " +
        std::to_string(reductions_ + 1) + " of this rank).");
  }
  for (size_t b = 0; equipment_.timeline && b < buckets_.size(); ++b) equipment_.timeline->done(b);
  waited_seconds_ += seconds_since(start);
  settlement.ranks = read_facts(facts, /*averaged=*/false);
  std::vector<float> totals(flags, flags + parameters);
  for (size_t i = 0; i < totals.size(); ++i) settlement.used[i] = std::fmod(totals[i], kOneDropped) > 0;
  return totals;
}

void Reducer::judge_nothing(const Settlement& settlement) const {
  const auto idle = [](const Facts& facts) { return facts.took_part() && facts.idle; };
  if (!fixed_.settings.list || !std::all_of(settlement.ranks.begin(), settlement.ranks.end(), idle) ||
      std::find(settlement.used.begin(), settlement.used.end(), true) != settlement.used.end())
    return;
  throw Error("an optimizer's step: since the last one no backward has reached a parameter of the list that "
              "DistributedDataParallel follows (" +
              fixed_.names.front() + (fixed_.names.size() > 1 ? ", ..." : "") +
              ") on any rank. If other tensors have taken their places, call refresh() with these on all ranks and make "
              "the optimizer of them; else leave out steps without a gradient");
}

Reducer::Settlement Reducer::settle(Share share) {
  const MutexLock lock(mutex_);
  at::NoGradGuard no_grad;
  if (is_in_backward_elsewhere()) note_beside_step();
  backward_.phase = Phase::kIdle;
  const bool idle = backward_.stage != Stage::kBegun;  // a step without a backward
  if (idle) begin_reduction();
  if (std::exchange(backward_.skips, false) && share == Share::kGradients) share = Share::kSkipped;
  if (share == Share::kGradients && fixed_.events.reducing) fixed_.events.reducing();
  std::vector<bool> dropped(fixed_.tensors.size());
  if (backward_.deferred_passes > 0 && passes_.since_reduction == 0 && share == Share::kGradients &&
      message_.trouble.empty()) {
    message_.trouble = change_of_gradients();
    dropped = dropped_gradients();
  }
  set_aside_passes();
  prepare_message(share, backward_.deferred_passes);
  message_.facts.idle = idle;
  Settlement settlement;
  settlement.used = fill_deferred();
  message_.facts.trouble = !message_.trouble.empty();
  settlement.ranks = {message_.facts};
  std::vector<float> totals;
  if (fixed_.group.world_size() > 1) totals = exchange(settlement, dropped);
  backward_.deferred_passes = 0;
  backward_.used.assign(backward_.used.size(), false);
  judge(settlement.ranks);
  judge_dropped(totals, dropped);
  judge_nothing(settlement);
  ++reductions_;
  settlement.divisor = fixed_.op() == ReduceOp::kMean ? fixed_.group.world_size() : 1;
  if (!buckets_.empty()) settlement.factor = factor(settlement.ranks);  // a rank alone is not weighted
  settlement.is_void = std::none_of(settlement.ranks.begin(), settlement.ranks.end(), std::mem_fn(&Facts::took_part));
  if (is_void(settlement.ranks)) {
    settlement.is_void = true;
    drop_gradients();
  } else if (equipment_.watch && equipment_.watch->policy() != NonFinitePolicy::kIgnore && judge_non_finite()) {
    settlement.is_void = true;
  }
  backward_.stage = Stage::kSettled;
  backward_.settled_by = std::this_thread::get_id();
  return settlement;
}

void Reducer::conclude(const Settlement& settlement, bool others_read) {
  const MutexLock lock(mutex_);
  if (others_read && fixed_.group.world_size() > 1) {
    const OperationLabel label("the end of an optimizer's step");
    fixed_.group.barrier();
  }
  backward_.stage = Stage::kConcluded;
  // What a rank that did not take part holds belongs to no step; gradients that were weighted are no longer its own.
  if (!message_.facts.took_part() || (weight() != 1 && !buckets_.empty())) drop_gradients();
  for (Bucket& bucket : buckets_) bucket.reset();
  own_page().count_step();
  fixed_.events.reduced(settlement.ranks);
  if (equipment_.timeline) equipment_.timeline->end(fixed_.group);
}

}  // namespace lockstep
