#include "reducer/reducer.h"

#include <algorithm>
#include <functional>
#include <map>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/clock.h"
#include "base/operation_label.h"
#include "base/rank_board.h"
#include "collectives/rank_names.h"

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

/// "number of passes" of each active rank; -1 stands for the others.
std::vector<int> passes_of(const std::vector<Facts>& ranks) {
  std::vector<int> passes;
  for (const Facts& facts : ranks) passes.push_back(facts.active ? facts.passes : -1);
  return passes;
}

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
                        .accumulated = [this, parameter] { on_gradient(parameter); },
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

void Reducer::on_gradient(size_t parameter) {
  std::lock_guard lock(mutex_);
  if (phase_ != Phase::kInBackward) begin_backward();
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
  if (passes_.reduce_every == 0 || captured_ == current_backward()) return;
  captured_ = current_backward();
  at_end_of_backward([](bool nested) {
    TORCH_CHECK(nested,
                "autograd::grad with respect to a parameter that DistributedDataParallel follows gives this rank's "
                "gradient alone, which nobody reduces; hold no_sync() to say that this is meant, or call backward()");
  });
}

void Reducer::begin_reduction() {
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
  reduces_ = passes_.reduce_every > 0 && passes_.since_reduction + 1 >= passes_.reduce_every;
  phase_ = Phase::kInBackward;
  at_end_of_outermost_backward({.finished = [this] { finish(); },
                                .nested =
                                    [this] {
                                      std::lock_guard lock(mutex_);
                                      launching_ = Launching::kAtEnd;
                                    },
                                .abandoned =
                                    [this] {
                                      std::lock_guard lock(mutex_);
                                      phase_ = Phase::kAbandoned;
                                    }});
}

void Reducer::finish() {
  std::lock_guard lock(mutex_);
  phase_ = Phase::kIdle;
  ++passes_.since_reduction;
  if (!reduces_) return;
  reduce_all(/*active=*/true);
}

void Reducer::reduce() {
  std::lock_guard lock(mutex_);
  begin_reduction();
  reduce_all(/*active=*/true);
}

std::vector<Facts> Reducer::shadow() {
  std::lock_guard lock(mutex_);
  begin_reduction();
  return reduce_all(/*active=*/false);
}

void Reducer::fail(const std::string& trouble) {
  std::lock_guard lock(mutex_);
  begin_reduction();
  trouble_ = trouble;
  reduce_all(/*active=*/true);
}

void Reducer::fill(size_t parameter, bool used) {
  const auto [bucket, slot] = places_[parameter];
  if (!used && settings_.reduction == GradientReduction::kSum && group_.rank() != 0)
    buckets_[bucket].forget_reduced(slot);
  if (equipment_.watch && used) equipment_.watch->look(parameter, tensors_[parameter].grad());
  if (const char* problem = buckets_[bucket].fill(slot, used)) note_trouble(parameter, problem);
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

std::vector<Facts> Reducer::reduce_all(bool active) {
  if (active && events_.reducing) events_.reducing();
  mine_.active = active;
  mine_.passes = passes_.since_reduction & 255;
  if (active)  // an edit is the reason for whatever else was found
    if (std::string edit = events_.inspect(); !edit.empty()) trouble_ = std::move(edit);
  if (!active)
    for (Bucket& bucket : buckets_) bucket.fill_with_zeros();
  for (size_t i = 0; i < places_.size() && !plan_.empty(); ++i)
    if (!buckets_[places_[i].bucket].filled(places_[i].slot)) fill(i, used_[i]);
  mine_.late = false;
  for (Bucket& bucket : buckets_)
    if (bucket.launched()) mine_.late |= bucket.take_late();
  mine_.trouble = !trouble_.empty();
  std::vector<Facts> ranks{mine_};
  if (!buckets_.empty()) {
    write_facts(buckets_.back().notes(), group_.rank(), mine_);
    launch_buckets(/*at_end=*/true);
    wait();
    ranks = read_facts(buckets_.back().notes(), op() == ReduceOp::kMean);
  }
  passes_.since_reduction = 0;
  used_.assign(used_.size(), false);
  judge(ranks);
  if (std::any_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::late))) {
    const OperationLabel label("gradients that came late");
    for (Bucket& bucket : buckets_) bucket.reduce_late(group_, op(), weight());
  }
  scale(ranks);
  for (Bucket& bucket : buckets_) bucket.finish();
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
      throw Error("the gradients of " + describe(b) + " could not be reduced: " + error.what() +
                  "\nEvery rank must run the same number of backward passes (this was reduction " +
                  std::to_string(reductions_ + 1) + " of this rank).");
    }
  }
  waited_seconds_ += seconds_since(start);
}

void Reducer::judge_objects(const std::vector<Facts>& ranks) {
  if (std::all_of(ranks.begin(), ranks.end(), [&](const Facts& facts) { return facts.object == ranks[0].object; }))
    return;
  const OperationLabel label("which model each rank reduces");
  const auto objects =
      group_.all_gather_bytes("number " + std::to_string(settings_.object) + " (" + names_[plan_.front().front()] +
                              " to " + names_[plan_.back().back()] + ")");
  std::string text;
  for (size_t rank = 0; rank < objects.size(); ++rank)
    if (std::find(objects.begin(), objects.begin() + static_cast<std::ptrdiff_t>(rank), objects[rank]) ==
        objects.begin() + static_cast<std::ptrdiff_t>(rank))
      text += (text.empty() ? "" : ", ") + ranks_with(objects, objects[rank]) + " those of " + objects[rank];
  text = "the ranks reduced gradients of different DistributedDataParallel objects: " + text +
         ", counted in the order in which they were attached to this group. Run their backward passes in the same "
         "order on every rank, or give each object a subgroup of its own";
  own_page().fail(RankFailure::kMismatch, -1, text);
  throw Error(text);
}

void Reducer::judge(const std::vector<Facts>& ranks) {
  judge_objects(ranks);
  const auto any = [&](bool Facts::*fact) { return std::any_of(ranks.begin(), ranks.end(), std::mem_fn(fact)); };
  if (any(&Facts::trouble)) {
    const OperationLabel label("what is wrong on each rank");
    const auto troubles = group_.all_gather_bytes(std::exchange(trouble_, ""));
    std::string text;
    for (const std::string& trouble : troubles) {
      if (trouble.empty() || text.find(trouble) != std::string::npos) continue;
      text += (text.empty() ? "" : "\n") + ranks_with(troubles, trouble) + ": " + trouble;
    }
    const auto first = std::find_if(troubles.begin(), troubles.end(), [](const auto& t) { return !t.empty(); });
    const bool mine = !troubles[static_cast<size_t>(group_.rank())].empty();
    // Ranks of a subgroup have other numbers for the launcher.
    const bool all = launchers_board() != nullptr && launchers_board()->world_size() == group_.world_size();
    own_page().fail(mine ? RankFailure::kOwn : RankFailure::kPeer,
                    all && !mine ? static_cast<int>(first - troubles.begin()) : -1, text);
    throw Error(text);
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank)
    if (ranks[rank].active && !ranks[rank].joining &&
        !std::all_of(ranks.begin(), ranks.end(), std::mem_fn(&Facts::active)))
      throw Error("rank " + std::to_string(rank) +
                  " ran a backward outside of join() while others have run out of inputs within it; every rank must "
                  "call join()");
  const std::vector<int> passes = passes_of(ranks);
  const int first = *std::max_element(passes.begin(), passes.end());
  for (const int other : passes)
    if (other != -1 && other != first)
      throw Error(
          "the ranks ran different numbers of backward passes before reducing gradients, beginning with those of " +
          (plan_.empty() ? "" : names_[plan_.front().front()]) + ": " + std::to_string(other) + " on " +
          ranks_with(passes, other) + " and " + std::to_string(first) + " on " + ranks_with(passes, first) +
          ". Every rank must run the same number, with no_sync() or accumulate() around the same ones.");
}

void Reducer::scale(const std::vector<Facts>& ranks) {
  double factor = 1;
  if (settings_.reduction == GradientReduction::kWeightedMean) {
    double total = 0;
    for (const Facts& facts : ranks) total += facts.active ? facts.weight : 0;
    factor = total > 0 ? 1 / total : 0;
  } else if (settings_.reduction == GradientReduction::kMean && divide_by_active_) {
    const auto active = std::count_if(ranks.begin(), ranks.end(), std::mem_fn(&Facts::active));
    if (active > 0) factor = static_cast<double>(ranks.size()) / static_cast<double>(active);
  }
  at::NoGradGuard no_grad;
  if (factor != 1)
    for (Bucket& bucket : buckets_) bucket.gradients().mul_(factor);
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
