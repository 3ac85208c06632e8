#include "reducer/reducer.h"

#include <algorithm>
#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "base/rank_names.h"
#include "collectives/group_state.h"
#include "rank_page/operation_label.h"
#include "rank_page/rank_board.h"

namespace lockstep {
namespace {

std::vector<ParameterSize> sizes_of(const NamedTensors& parameters) {
  std::map<std::pair<at::ScalarType, std::string>, int> kinds;
  std::vector<ParameterSize> sizes;
  for (const auto& [name, parameter] : parameters) {
    const auto key = std::make_pair(parameter.scalar_type(), parameter.device().str());
    const int kind = kinds.try_emplace(key, static_cast<int>(kinds.size())).first->second;
    sizes.push_back({static_cast<int64_t>(parameter.nbytes()), kind});
  }
  return sizes;
}

/// A rank's page has room for two names of this length.
constexpr size_t kLabelledName = 40;

/// The end of a name tells layers apart.
std::string shortened(const std::string& name, size_t longest) {
  return name.size() <= longest ? name : "..." + name.substr(name.size() - longest + 3);
}

constexpr const char* kNothingForAHook =
    "an optimizer that sums gradients itself sends no buckets, so a communication hook would have no effect; remove "
    "the hook, or use another optimizer";

}  // namespace

Reducer::Fixed::Fixed(const NamedTensors& parameters, Group over, Settings how, Events to)
    : group(std::move(over)), settings(how), events(std::move(to)), places(parameters.size()) {
  if (const auto& known = state_of(group).virtual_ranks; known && !known->one_each()) virtual_ranks = known;
  for (const auto& [name, tensor] : parameters) {
    names.push_back(name);
    tensors.push_back(tensor);
  }
  if (group.world_size() > 1) plan = plan_buckets(sizes_of(parameters), settings.limits);
  for (size_t b = 0; b < plan.size(); ++b) {
    for (size_t slot = 0; slot < plan[b].size(); ++slot) places[plan[b][slot]] = {b, slot};
    labels.push_back(describe(b, kLabelledName));
  }
}

ReduceOp Reducer::Fixed::op() const {
  return settings.reduction == GradientReduction::kMean && !virtual_ranks ? ReduceOp::kMean : ReduceOp::kSum;
}

std::string Reducer::Fixed::describe(size_t bucket, size_t longest_name) const {
  const std::string first = shortened(names[plan[bucket].front()], longest_name),
                    last = shortened(names[plan[bucket].back()], longest_name);
  return "bucket " + std::to_string(bucket + 1) + " of " + std::to_string(plan.size()) + " (" + first +
         (first == last ? "" : " to " + last) + ")";
}

Reducer::Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events)
    : fixed_(parameters, std::move(group), settings, std::move(events)), passes_(passes) {
  for (const auto& members : fixed_.plan) {
    std::vector<at::Tensor> tensors;
    for (const size_t parameter : members) tensors.push_back(fixed_.tensors[parameter]);
    const bool last = buckets_.size() + 1 == fixed_.plan.size();
    buckets_.emplace_back(std::move(tensors), fixed_.group,
                          /*notes=*/last ? fixed_.rows() * kFactElements : 0);
  }
  message_.passes_seen = passes_noted();
  make_virtual_step();
  backward_.used.resize(parameters.size());
  message_.facts.object = settings.object & 255;
  for (size_t i = 0; i < parameters.size(); ++i) follow(i, fixed_.tensors[i]);
}

void Reducer::follow(size_t parameter, const at::Tensor& tensor) {
  GradientEvents events{.before = [this, parameter] { before_gradient(parameter); },
                        .accumulated = [this, parameter](bool any) { on_gradient(parameter, any); },
                        .captured = [this] { on_captured(); }};
  hooks_.push_back(std::make_unique<GradientHook>(tensor, std::move(events)));
}

/// A thread that comes while another waits in finish() waits here, before it touches .grad.
void Reducer::before_gradient(size_t parameter) {
  const bool beside = is_stepped_elsewhere();  // the step may end while this waits for the mutex
  const MutexLock lock(mutex_);
  if (beside || is_stepped_elsewhere()) {
    note_beside_step();
    TORCH_CHECK(false, message_.trouble);
  }
  if (backward_.phase != Phase::kInBackward) begin_backward();
  look_at_thread(parameter);
  if (virtual_) {
    virtual_->before_accumulation(parameter);
  } else if (fixed_.rank_zero_adds_it() && !fixed_.plan.empty()) {
    const auto [bucket, slot] = fixed_.places[parameter];
    buckets_[bucket].forget_reduced(slot);
  }
}

void Reducer::equip(Equipment equipment) {
  const MutexLock lock(mutex_);
  TORCH_CHECK(!deferral_ || !equipment.hook, kNothingForAHook);
  check_virtual(equipment.hook.get(), /*defers=*/false);
  exchanges_.clear();
  equipment_ = std::move(equipment);
}

void Reducer::defer(Step step) {
  const MutexLock lock(mutex_);
  TORCH_CHECK(!step || !equipment_.hook, kNothingForAHook);
  check_virtual(/*hook=*/nullptr, step != nullptr);
  deferral_ = std::move(step);
}

void Reducer::set_weight(double weight) {
  const MutexLock lock(mutex_);
  message_.facts.weight = weight;
}

void Reducer::set_joining(bool joining, bool divide_by_active) {
  const MutexLock lock(mutex_);
  message_.facts.joining = message_.begins_join = joining;
  message_.divide_by_active = divide_by_active;
}

void Reducer::notice() {
  const MutexLock lock(mutex_);
  if (backward_.phase != Phase::kInBackward) begin_backward();
}

void Reducer::on_gradient(size_t parameter, bool any) {
  const MutexLock lock(mutex_);
  if (backward_.phase != Phase::kInBackward) begin_backward();
  look_at_thread(parameter);
  if (!any) return;
  // Autograd's zeros have no memory, which all that look at a gradient read.
  if (const at::Tensor& gradient = fixed_.tensors[parameter].grad(); gradient.defined() && gradient._is_zerotensor())
    fixed_.tensors[parameter].mutable_grad() = at::zeros(gradient.sizes(), gradient.options());
  backward_.used[parameter] = true;
  if (virtual_) return on_leaf_gradient(parameter);
  if (!backward_.reduces) return;
  if (fixed_.plan.empty()) {
    if (equipment_.watch) equipment_.watch->look(parameter, fixed_.tensors[parameter].grad());
    return;
  }
  if (current_backward() != backward_.number) backward_.launching = Launching::kAtEnd;
  const auto [bucket, slot] = fixed_.places[parameter];
  if (buckets_[bucket].launched()) {  // late: the gradient lies in .grad until the end
    if (const char* problem = buckets_[bucket].problem(slot)) note_trouble(parameter, problem);
    return;
  }
  fill(parameter, /*used=*/true);
  if (backward_.launching == Launching::kWhenFull && !deferral_) launch_buckets(/*at_end=*/false);
}

void Reducer::on_captured() {
  {
    const MutexLock lock(mutex_);
    if (passes_.reduce_every() == 0 || backward_.captured == current_backward()) return;
    backward_.captured = current_backward();
  }
  at_end_of_backward([](bool nested) {
    TORCH_CHECK(nested,
                "autograd::grad with respect to a parameter that DistributedDataParallel follows returns this rank's "
                "own gradient, which is not reduced; hold a no_sync() guard if you want that, or call backward()");
  });
}

void Reducer::begin_reduction() {
  if (backward_.interrupted()) {  // the others wait for the remaining buckets
    message_.trouble =
        "an exception ended a backward after " + std::to_string(backward_.launched) + " of " +
        std::to_string(buckets_.size()) +
        " buckets of gradients had been sent, and this rank went on; a rank that catches an exception from forward "
        "or backward must call skip_step()";
    reduce_all(Share::kGradients);
  }
  const bool adds = deferral_ && backward_.deferred_passes > 0;  // to what waits for an optimizer's step
  // Passes that have accumulated since have no marks of their own.
  const std::string change = adds && passes_.since_reduction == 0 ? change_between_passes() : "";
  backward_.stage = Stage::kBegun;
  // A backward that an exception ended may have left buckets half filled.
  for (Bucket& bucket : buckets_) bucket.reset();
  backward_.launched = 0;
  if (virtual_ && !virtual_->facts().empty()) return;  // within a step
  // What a deferred backward has found, settle() tells.
  if (!message_.lasting && !adds) message_.trouble.clear();
  if (message_.trouble.empty()) message_.trouble = change;
  if (equipment_.watch && backward_.deferred_passes == 0) equipment_.watch->begin();
  if (equipment_.timeline) equipment_.timeline->begin(buckets_.size());
}

void Reducer::begin_backward() {
  if (fixed_.events.backward_begins) fixed_.events.backward_begins(awaits_step());
  // Between clip_grad_norm() and step(), say: what that thread has settled would be lost.
  const bool beside = backward_.stage == Stage::kSettled && fixed_.on_cpu() &&
                      backward_.settled_by != std::this_thread::get_id();
  begin_reduction();
  if (beside) note_beside_step();
  look_at_virtual_rank();
  backward_.skips = false;
  backward_.number = current_backward();
  backward_.thread = std::this_thread::get_id();
  backward_.reduces = passes_.reduce_every() > 0 && passes_.since_reduction + 1 >= passes_.reduce_every();
  if (virtual_) begin_leaf_backward();
  backward_.phase = Phase::kInBackward;
  at_end_of_outermost_backward({.finished = [this] { finish(); },
                                .nested =
                                    [this] {
                                      const MutexLock lock(mutex_);
                                      backward_.launching = Launching::kAtEnd;
                                    },
                                .abandoned =
                                    [this, backward = backward_.number] {
                                      const MutexLock lock(mutex_);
                                      if (backward == backward_.number && backward_.phase == Phase::kInBackward)
                                        backward_.phase = Phase::kAbandoned;
                                    }});
}

void Reducer::finish() {
  const MutexLock lock(mutex_);
  backward_.phase = Phase::kIdle;
  ++passes_.since_reduction;
  if (virtual_) return finish_leaf_backward();
  if (!backward_.reduces) return;
  if (deferral_)
    set_aside_passes();
  else
    reduce_all(Share::kGradients);
}

void Reducer::reduce() {
  const MutexLock lock(mutex_);
  begin_reduction();
  if (deferral_)
    set_aside_passes();
  else
    reduce_all(Share::kGradients);
}

void Reducer::skip() {
  const MutexLock lock(mutex_);
  if (virtual_) return skip_leaf();
  if (!backward_.interrupted()) begin_reduction();
  if (!message_.lasting) message_.trouble.clear();
  if (equipment_.watch) equipment_.watch->begin();
  if (deferral_)
    skip_deferred();
  else
    reduce_all(Share::kSkipped);
}

std::vector<Facts> Reducer::shadow() {
  Step step;
  {
    const MutexLock lock(mutex_);
    begin_reduction();
    step = deferral_;
    if (!step) return reduce_all(Share::kOutOfInputs);
  }
  return step(Share::kOutOfInputs);
}

void Reducer::fail(const std::string& trouble) {
  {
    const MutexLock lock(mutex_);
    begin_reduction();
    message_.trouble = trouble;
    if (!deferral_) {
      reduce_all(Share::kGradients);
      return;
    }
  }
  settle();
}

void Reducer::fill(size_t parameter, bool used) {
  const auto [bucket, slot] = fixed_.places[parameter];
  const bool counts = used || !fixed_.rank_zero_adds_it();
  if (equipment_.watch && used) equipment_.watch->look(parameter, fixed_.tensors[parameter].grad());
  if (const char* problem = buckets_[bucket].fill(slot, used, counts)) note_trouble(parameter, problem);
  if (equipment_.timeline && buckets_[bucket].full()) equipment_.timeline->ready(bucket);
}

void Reducer::succeed(const Reducer& before) {
  const MutexLock theirs(before.mutex_);
  const MutexLock lock(mutex_);
  message_.facts = before.message_.facts;
  message_.passes_seen = before.message_.passes_seen;
  message_.divide_by_active = before.message_.divide_by_active;
  reductions_ = before.reductions_;
  waited_seconds_ = before.waited_seconds();
  deferral_ = before.deferral_;
  backward_.deferred_passes = before.backward_.deferred_passes;
  if (fixed_.plan.empty()) return;
  for (const auto& [bucket, slot] : fixed_.places) buckets_[bucket].adopt(slot, /*reduced=*/!deferral_);
  backward_.marks = marks();
}

void Reducer::prepare_message(Share share, int passes) {
  Facts& mine = message_.facts;
  mine.active = share != Share::kOutOfInputs;
  mine.skipped = share == Share::kSkipped;
  mine.spoiled = mine.skipped && backward_.launched > 0;
  mine.passes = facts_of_passes(passes);
  mine.late = mine.idle = false;
  note_passes();
  if (mine.active)  // an edit explains whatever else was found
    if (std::string edit = fixed_.events.inspect(); !edit.empty()) message_.trouble = std::move(edit);
}

std::vector<Facts> Reducer::exchange(Share share) {
  prepare_message(share, passes_.since_reduction);
  Facts& mine = message_.facts;
  if (!mine.took_part())
    for (size_t b = backward_.launched; b < buckets_.size(); ++b) buckets_[b].fill_with_zeros();
  for (size_t i = 0; i < fixed_.places.size() && !buckets_.empty(); ++i)
    if (!buckets_[fixed_.places[i].bucket].filled(fixed_.places[i].slot)) fill(i, backward_.used[i]);
  for (Bucket& bucket : buckets_)
    if (bucket.launched()) mine.late |= bucket.take_late();
  if (buckets_.empty()) {
    mine.trouble = !message_.trouble.empty();
    return {mine};
  }
  const auto say = [&] {
    mine.trouble = !message_.trouble.empty();
    write_facts(buckets_.back().notes(), fixed_.group.rank(), mine);
  };
  say();
  launch_buckets(/*at_end=*/true);
  wait(say);
  return read_facts(buckets_.back().notes(), fixed_.op() == ReduceOp::kMean);
}

std::vector<Facts> Reducer::reduce_all(Share share) {
  backward_.phase = Phase::kIdle;
  if (share == Share::kGradients && fixed_.events.reducing) fixed_.events.reducing();
  const VirtualStep::Ending ending(virtual_.get());
  const std::vector<Facts> ranks = virtual_ ? exchange_leaves(share) : exchange(share);
  passes_.since_reduction = 0;
  backward_.used.assign(backward_.used.size(), false);
  judge(ranks);
  if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::late))) {
    const OperationLabel label("gradients that came late");
    for (Bucket& bucket : buckets_) bucket.reduce_late(fixed_.group, fixed_.op(), weight());
  }
  if (const double scale = factor(ranks); virtual_) {
    conclude_sums(scale);
  } else if (scale != 1) {
    at::NoGradGuard no_grad;
    for (Bucket& bucket : buckets_) bucket.gradients().mul_(scale);
  }
  finish_buckets(ranks);
  ++reductions_;
  own_page().count_step();
  fixed_.events.reduced(ranks);
  if (equipment_.timeline) equipment_.timeline->end(fixed_.group);
  if (equipment_.watch && equipment_.watch->policy() != NonFinitePolicy::kIgnore) judge_non_finite();
  return ranks;
}

void Reducer::note_trouble(size_t parameter, const std::string& what) {
  if (message_.trouble.empty()) message_.trouble = "parameter " + fixed_.names[parameter] + " " + what;
}

}  // namespace lockstep
