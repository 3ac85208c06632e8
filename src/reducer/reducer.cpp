#include "reducer/reducer.h"

#include <algorithm>
#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "base/rank_names.h"
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

/// What a rank's page has room for, twice.
constexpr size_t kLabelledName = 40;

/// The end of a name tells layers apart.
std::string shortened(const std::string& name, size_t longest) {
  return name.size() <= longest ? name : "..." + name.substr(name.size() - longest + 3);
}

/// As they are told to others: 0, or 1 to 255 and again from 1.
int told(int passes) { return passes == 0 ? 0 : 1 + (passes - 1) % 255; }

constexpr const char* kSameNumber =
    "Every rank must run the same number of backward passes; where ranks have different numbers of batches, run the "
    "loop within join()";

}  // namespace

Reducer::Reducer(const NamedTensors& parameters, Group group, Settings settings, BackwardPasses& passes, Events events)
    : group_(std::move(group)),
      settings_(settings),
      events_(std::move(events)),
      places_(parameters.size()),
      passes_(passes),
      used_(parameters.size()) {
  if (group_.world_size() > 1) plan_ = plan_buckets(sizes_of(parameters), settings_.limits);
  for (size_t b = 0; b < plan_.size(); ++b) {
    std::vector<at::Tensor> members;
    for (size_t slot = 0; slot < plan_[b].size(); ++slot) {
      members.push_back(parameters[plan_[b][slot]].second);
      places_[plan_[b][slot]] = {b, slot};
    }
    buckets_.emplace_back(std::move(members), group_,
                          /*notes=*/b + 1 == plan_.size() ? group_.world_size() * kFactElements : 0);
  }
  for (const auto& [name, tensor] : parameters) {
    follow(names_.size(), tensor);
    names_.push_back(name);
    tensors_.push_back(tensor);
  }
  for (size_t b = 0; b < plan_.size(); ++b) labels_.push_back(describe(b, kLabelledName));
  mine_.object = settings_.object & 255;
}

void Reducer::follow(size_t parameter, const at::Tensor& tensor) {
  GradientEvents events{.before = nullptr,
                        .accumulated = [this, parameter](bool any) { on_gradient(parameter, any); },
                        .captured = [this] { on_captured(); }};
  if (settings_.reduction == GradientReduction::kSum && group_.rank() != 0)
    events.before = [this, parameter] {
      const auto [bucket, slot] = places_[parameter];
      buckets_[bucket].forget_reduced(slot);
    };
  hooks_.push_back(std::make_unique<GradientHook>(tensor, std::move(events)));
}

void Reducer::equip(Equipment equipment) {
  std::lock_guard lock(mutex_);
  equipment_ = std::move(equipment);
}

void Reducer::set_joining(bool joining, bool divide_by_active) {
  mine_.joining = joining;
  divide_by_active_ = divide_by_active;
}

void Reducer::notice() {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::kInBackward) begin_backward();
}

void Reducer::on_gradient(size_t parameter, bool any) {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::kInBackward) begin_backward();
  if (!any) return;
  used_[parameter] = true;
  if (!reduces_) return;
  if (plan_.empty()) {
    if (equipment_.watch) equipment_.watch->look(parameter, tensors_[parameter].grad());
    return;
  }
  if (current_backward() != backward_) launching_ = Launching::kAtEnd;
  const auto [bucket, slot] = places_[parameter];
  if (buckets_[bucket].launched()) {  // late: the gradient lies in .grad until the end
    if (const char* problem = buckets_[bucket].problem(slot)) note_trouble(parameter, problem);
    return;
  }
  fill(parameter, /*used=*/true);
  if (launching_ == Launching::kWhenFull) launch_buckets(/*at_end=*/false);
}

void Reducer::on_captured() {
  if (passes_.reduce_every() == 0 || captured_ == current_backward()) return;
  captured_ = current_backward();
  at_end_of_backward([](bool nested) {
    TORCH_CHECK(nested,
                "autograd::grad with respect to a parameter that DistributedDataParallel follows gives this rank's "
                "gradient alone, which nobody reduces; hold no_sync() to say that this is meant, or call backward()");
  });
}

void Reducer::begin_reduction() {
  if (interrupted()) {  // the others wait for the rest
    trouble_ =
        "an exception ended a backward after " + std::to_string(launched_) + " of " + std::to_string(buckets_.size()) +
        " buckets of gradients had been sent, and this rank went on; a rank that catches an exception of forward "
        "or backward must call skip_step()";
    reduce_all(Share::kGradients);
  }
  // A backward that an exception ended has left its buckets half filled.
  for (Bucket& bucket : buckets_) bucket.reset();
  launched_ = 0;
  trouble_.clear();
  if (equipment_.watch) equipment_.watch->begin();
  if (equipment_.timeline) equipment_.timeline->begin(buckets_.size());
}

void Reducer::begin_backward() {
  begin_reduction();
  backward_ = current_backward();
  reduces_ = passes_.reduce_every() > 0 && passes_.since_reduction + 1 >= passes_.reduce_every();
  phase_ = Phase::kInBackward;
  at_end_of_outermost_backward({.finished = [this] { finish(); },
                                .nested =
                                    [this] {
                                      std::lock_guard lock(mutex_);
                                      launching_ = Launching::kAtEnd;
                                    },
                                .abandoned =
                                    [this, backward = backward_] {
                                      std::lock_guard lock(mutex_);
                                      if (backward == backward_ && phase_ == Phase::kInBackward)
                                        phase_ = Phase::kAbandoned;
                                    }});
}

void Reducer::finish() {
  std::lock_guard lock(mutex_);
  phase_ = Phase::kIdle;
  ++passes_.since_reduction;
  if (!reduces_) return;
  reduce_all(Share::kGradients);
}

void Reducer::reduce() {
  std::lock_guard lock(mutex_);
  begin_reduction();
  reduce_all(Share::kGradients);
}

void Reducer::skip() {
  std::lock_guard lock(mutex_);
  if (!interrupted()) begin_reduction();
  trouble_.clear();
  if (equipment_.watch) equipment_.watch->begin();
  reduce_all(Share::kSkipped);
}

std::vector<Facts> Reducer::shadow() {
  std::lock_guard lock(mutex_);
  begin_reduction();
  return reduce_all(Share::kOutOfInputs);
}

void Reducer::fail(const std::string& trouble) {
  std::lock_guard lock(mutex_);
  begin_reduction();
  trouble_ = trouble;
  reduce_all(Share::kGradients);
}

void Reducer::fill(size_t parameter, bool used) {
  const auto [bucket, slot] = places_[parameter];
  const bool counts = used || settings_.reduction != GradientReduction::kSum || group_.rank() == 0;
  if (equipment_.watch && used) equipment_.watch->look(parameter, tensors_[parameter].grad());
  if (const char* problem = buckets_[bucket].fill(slot, used, counts)) note_trouble(parameter, problem);
  if (equipment_.timeline && buckets_[bucket].full()) equipment_.timeline->ready(bucket);
}

void Reducer::launch_buckets(bool at_end) {
  const size_t end = at_end ? buckets_.size() : buckets_.size() - 1;
  for (; launched_ < end && buckets_[launched_].full(); ++launched_) launch(buckets_[launched_]);
}

ReduceOp Reducer::op() const {
  return settings_.reduction == GradientReduction::kMean ? ReduceOp::kMean : ReduceOp::kSum;
}

double Reducer::weight() const { return settings_.reduction == GradientReduction::kWeightedMean ? mine_.weight : 1; }

void Reducer::launch(Bucket& bucket) {
  at::NoGradGuard no_grad;
  const OperationLabel label(labels_[launched_]);
  if (weight() != 1) weight() == 0 ? bucket.gradients().zero_() : bucket.gradients().mul_(weight());
  try {
    const bool last = launched_ + 1 == buckets_.size();
    if (equipment_.timeline) equipment_.timeline->launched(launched_);
    if (equipment_.hook)
      bucket.launch_by(*equipment_.hook, group_, op(), static_cast<int64_t>(launched_), last);
    else
      bucket.launch(group_, op());
  } catch (const Error& error) {
    throw Error("the gradients of " + describe(launched_) + " could not be sent: " + error.what());
  }
}

void Reducer::succeed(const Reducer& before) {
  mine_ = before.mine_;
  divide_by_active_ = before.divide_by_active_;
  reductions_ = before.reductions_;
  waited_seconds_ = before.waited_seconds_;
  if (plan_.empty()) return;
  for (const auto& [bucket, slot] : places_) buckets_[bucket].adopt(slot);
}

std::vector<Facts> Reducer::exchange(Share share) {
  mine_.active = share != Share::kOutOfInputs;
  mine_.skipped = share == Share::kSkipped;
  mine_.spoiled = mine_.skipped && launched_ > 0;
  mine_.passes = told(passes_.since_reduction);
  if (mine_.active)  // an edit is the reason for whatever else was found
    if (std::string edit = events_.inspect(); !edit.empty()) trouble_ = std::move(edit);
  if (!mine_.took_part())
    for (size_t b = launched_; b < buckets_.size(); ++b) buckets_[b].fill_with_zeros();
  for (size_t i = 0; i < places_.size() && !plan_.empty(); ++i)
    if (!buckets_[places_[i].bucket].filled(places_[i].slot)) fill(i, used_[i]);
  mine_.late = false;
  for (Bucket& bucket : buckets_)
    if (bucket.launched()) mine_.late |= bucket.take_late();
  mine_.trouble = !trouble_.empty();
  if (buckets_.empty()) return {mine_};
  write_facts(buckets_.back().notes(), group_.rank(), mine_);
  launch_buckets(/*at_end=*/true);
  wait();
  return read_facts(buckets_.back().notes(), op() == ReduceOp::kMean);
}

std::vector<Facts> Reducer::reduce_all(Share share) {
  phase_ = Phase::kIdle;
  if (share == Share::kGradients && events_.reducing) events_.reducing();
  const std::vector<Facts> ranks = exchange(share);
  passes_.since_reduction = 0;
  used_.assign(used_.size(), false);
  judge(ranks);
  if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::late))) {
    const OperationLabel label("gradients that came late");
    for (Bucket& bucket : buckets_) bucket.reduce_late(group_, op(), weight());
  }
  scale(ranks);
  finish_buckets(ranks);
  ++reductions_;
  own_page().count_step();
  events_.reduced(ranks);
  if (equipment_.timeline) equipment_.timeline->end(group_);
  if (equipment_.watch && equipment_.watch->policy() != NonFinitePolicy::kIgnore) judge_non_finite();
  return ranks;
}

void Reducer::judge_non_finite() {
  const OperationLabel label("the search for non-finite gradients");
  const std::string findings = equipment_.watch->findings(group_, names_);
  if (findings.empty()) return;
  for (const at::Tensor& tensor : tensors_) tensor.mutable_grad().reset();
  if (equipment_.watch->policy() == NonFinitePolicy::kRaise) {
    own_page().fail(RankFailure::kDiverged, -1, findings);
    throw Error(findings + " (reduction " + std::to_string(reductions_) +
                "); no gradient is left on any rank, so the step can be skipped");
  }
  equipment_.watch->count_skipped();
}

void Reducer::wait() {
  const auto start = Clock::now();
  if (equipment_.timeline) equipment_.timeline->waits();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    const OperationLabel label(labels_[b]);  // of what a hook still has to do
    try {
      buckets_[b].wait();
      if (equipment_.timeline) equipment_.timeline->done(b);
    } catch (const Error& error) {
      throw Error("the gradients of " + describe(b) + " could not be reduced: " + error.what() + "\n" + kSameNumber +
                  " (this was reduction " + std::to_string(reductions_ + 1) + " of this rank).");
    }
  }
  waited_seconds_ += seconds_since(start);
}

void Reducer::note_trouble(size_t parameter, const std::string& what) {
  if (trouble_.empty()) trouble_ = "parameter " + names_[parameter] + " " + what;
}

std::string Reducer::describe(size_t bucket, size_t longest_name) const {
  const std::string first = shortened(names_[plan_[bucket].front()], longest_name),
                    last = shortened(names_[plan_[bucket].back()], longest_name);
  return "bucket " + std::to_string(bucket + 1) + " of " + std::to_string(plan_.size()) + " (" + first +
         (first == last ? "" : " to " + last) + ")";
}

}  // namespace lockstep
