#include <algorithm>
#include <sstream>
#include <unordered_map>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "base/loop_begin.h"
#include "base/rank_names.h"
#include "base/shared_weights.h"
#include "base/state_in_use.h"
#include "base/text.h"
#include "base/weights_set.h"
#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "collectives/sharded_parameters.h"
#include "collectives/storages.h"
#include "data_parallel/replica_state.h"
#include "data_parallel/same_model.h"
#include "nn/batch_norm_operator.h"
#include "rank_page/operation_label.h"

// Attaching to a module, and re-attaching after an edit.

namespace lockstep {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

void set_to_rank_zeros(const Group& group, const std::vector<at::Tensor>& tensors) {
  if (group.world_size() == 1 || tensors.empty()) return;
  const OperationLabel label("the initial parameters");
  broadcast_weights(group, tensors, /*root=*/0);
  note_weights_set(storages_of(tensors));
}

std::vector<at::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

void check(const DistributedDataParallelOptions& options) {
  TORCH_CHECK(options.first_bucket_cap_mb > 0 && options.bucket_cap_mb > 0,
              "bucket_cap_mb and first_bucket_cap_mb must be positive; they are ", options.bucket_cap_mb, " and ",
              options.first_bucket_cap_mb);
  TORCH_CHECK(options.gradient_as_bucket_view,
              "gradient_as_bucket_view is false, but here .grad is always a view of its bucket; remove the option, and "
              "clone() gradients that you keep beyond the next step");
}

/// The options that must be the same on all ranks, one per line.
std::string describe(const DistributedDataParallelOptions& options, const VirtualRanks* virtual_ranks) {
  constexpr const char* kReductions[] = {"kMean", "kSum", "kWeightedMean"};
  constexpr const char* kPolicies[] = {"kFollowRankZero", "kMean", "kNone"};
  std::ostringstream text;
  text << "virtual_ranks " << (virtual_ranks ? virtual_ranks->count() : 0) << "\nfirst_bucket_cap_mb "
       << options.first_bucket_cap_mb << "\nbucket_cap_mb " << options.bucket_cap_mb << "\nreduction "
       << kReductions[static_cast<int>(options.reduction)] << "\nbuffers "
       << kPolicies[static_cast<int>(options.buffers)] << "\ninit_sync " << (options.init_sync ? "true" : "false")
       << '\n';
  for (const auto& name : options.delay_all_reduce_named_params) text << "delayed " << name << '\n';
  for (const auto& name : options.parameters_to_ignore) text << "ignored " << name << '\n';
  return text.str();
}

BucketLimits limits_of(const DistributedDataParallelOptions& options) {
  constexpr double kMebibyte = 1 << 20, kMost = 1e18;  // infinity is one bucket for all
  return {static_cast<int64_t>(std::min(options.first_bucket_cap_mb * kMebibyte, kMost)),
          static_cast<int64_t>(std::min(options.bucket_cap_mb * kMebibyte, kMost))};
}

/// A module lists every tensor once, under one name; a user's list may not.
void check_distinct(const NamedTensors& parameters) {
  std::unordered_map<std::string, const c10::TensorImpl*> by_name;
  std::unordered_map<const c10::TensorImpl*, std::string> by_tensor;
  for (const auto& [name, tensor] : parameters) {
    TORCH_CHECK(tensor.defined(), "parameter ", name, " is an undefined tensor");
    const auto* impl = tensor.unsafeGetTensorImpl();
    const auto [other, is_new] = by_tensor.try_emplace(impl, name);
    TORCH_CHECK(by_name.try_emplace(name, impl).second, "two parameters of the list are named ", name,
                "; give each a name of its own");
    TORCH_CHECK(is_new, "parameters ", other->second, " and ", name,
                " of the list are the same tensor; list it only once");
  }
}

/// The result of `body`, or the text of its exception.
std::string problem_or_failure_of(const std::function<std::string()>& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return error.what();
  }
}

}  // namespace

Replica::State::State(std::unique_ptr<Source> from, const Group& in, DistributedDataParallelOptions with)
    : group(in),
      options(std::move(with)),
      attached(
          options.parameters_to_ignore, [this] { reducer->note_unfollowed_backward(); },
          /*watches_untrained=*/group.rank() == 0) {
  check(options);
  const OperationLabel label(from->attaching_call());
  check_same_on_all_ranks(group, "option", describe(options, lockstep::state_of(group).virtual_ranks.get()));
  number_ = ++state_of(group).replicas;
  attach(std::move(from));
  watch_.emplace([this] {
    loop_begins();
    note_backward();
    if (const std::string gone = attached.left_behind(); !gone.empty()) reducer->fail(gone);
    attached.watch_strangers();
  });
}

void Replica::State::compare(const AttachedModel::Tensors& now) const {
  const bool first = reducer == nullptr;
  const auto remark = [&](const at::Tensor& tensor) {
    const bool is_new = !attached.is_known(tensor);
    return std::string(is_new && GradientHook::follows(tensor) ? ", already attached" : "") +
           (is_new && !first ? ", new" : "") + (tensor.is_leaf() ? "" : ", not a leaf") +
           (tensor.layout() == at::kStrided ? "" : ", sparse");
  };
  check_same_on_all_ranks(group, "parameter", now.parameters, remark);
  check_same_on_all_ranks(group, "buffer", now.buffers, remark);
  check_distinct(now.parameters);
  for (const auto& [name, tensor] : now.buffers)
    TORCH_CHECK(tensor.layout() == at::kStrided, "buffer ", name, " is sparse (", tensor.layout(),
                "), and only dense buffers can be kept equal; make it dense, or name it in parameters_to_ignore");
  for (const auto& [name, tensor] : now.parameters) {
    TORCH_CHECK(
        tensor.layout() == at::kStrided, "parameter ", name, " is sparse (", tensor.layout(),
        "), and only gradients of dense parameters can be reduced; make it dense, or name it in parameters_to_ignore");
    TORCH_CHECK(tensor.is_leaf(), "parameter ", name,
                " is the result of an operation, so backward leaves no gradient in it; pass the tensor that it was "
                "computed from, or detach() it and set requires_grad");
    TORCH_CHECK(attached.is_known(tensor) || !GradientHook::follows(tensor), "parameter ", name,
                " is already attached to a DistributedDataParallel; destroy that one first, or call its refresh()");
    TORCH_CHECK(!is_sharded(tensor), "parameter ", name,
                " is held by a FullyShardedDataParallel, which already adds up its gradients; use one of the two");
    TORCH_CHECK(attached.is_known(tensor) || !GradientHook::is_reduced_by_c10d(tensor), "the gradients of parameter ",
                name, " are already averaged by torch's DistributedDataParallel (c10d::Reducer); use one of the two");
  }
}

void Replica::State::check_weights(const NamedTensors& parameters) const {
  if (options.reduction != GradientReduction::kWeightedMean || group.world_size() == 1) return;
  for (const auto& [name, tensor] : parameters)
    TORCH_CHECK(
        !is_synchronized(tensor), "GradientReduction::kWeightedMean and a synchronised batch norm (", name,
        "): its backward mixes the losses of all ranks before their gradients are weighted. Use kSum, and divide "
        "the sum over this rank's samples by the number of samples on all ranks");
}

NamedTensors Replica::State::to_follow(const NamedTensors& parameters) const {
  NamedTensors followed = parameters;
  std::erase_if(followed, [](const auto& parameter) { return !parameter.second.requires_grad(); });
  TORCH_CHECK(!followed.empty(),
              "the module has no parameter that requires grad, so there is nothing to reduce; use it without "
              "DistributedDataParallel");
  const auto& delayed = options.delay_all_reduce_named_params;
  for (const auto& name : delayed)
    TORCH_CHECK(std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.first == name; }),
                "delay_all_reduce_named_params names ", name, ", which is not a parameter of the module");
  // The plan traverses the parameters backwards.
  std::stable_partition(followed.begin(), followed.end(), [&](const auto& p) { return contains(delayed, p.first); });
  return followed;
}

void Replica::State::attach(std::unique_ptr<Source> from) {
  TORCH_CHECK(passes->since_reduction == 0, "gradients of ",
              counted(passes->since_reduction, "backward pass", "backward passes"),
              " wait in .grad; call reduce_gradients() before refresh()");
  TORCH_CHECK(join.options == nullptr,
              "refresh() was called within join(), where ranks that have run out of inputs cannot call it");
  const OperationLabel label(reducer ? "refresh()" : from->attaching_call());
  const Source& source = from ? *from : attached.source();
  AttachedModel::Tensors now{
      .parameters = attached.parameters_of(source), .buffers = attached.buffers_of(source), .followed = {}};
  compare(now);
  check_same_on_all_ranks(group, "layer", source.layers());
  check_weights(now.parameters);
  now.followed = to_follow(now.parameters);
  // The old reducer is replaced only when every rank has made the new one.
  std::unique_ptr<Reducer> next;
  throw_on_all_ranks(problem_or_failure_of([&] {
    next = make_counted_reducer(now.followed, source, now.handles);
    return std::string();
  }));
  throw_on_all_ranks(problem_of(now, source));
  if (reducer || options.init_sync) {
    std::vector<at::Tensor> unknown;
    for (const auto* list : {&now.parameters, &now.buffers})
      for (const auto& [name, tensor] : *list)
        if (!attached.is_known(tensor)) unknown.push_back(tensor);
    set_to_rank_zeros(group, unknown);
  }
  attached.attach(std::move(from), now);
  next->equip(equipment);
  reducer.swap(next);
  ++attachments;
  if (next) reducer->take_over_from(*next);
  synchronization.follow_buffers();
}

std::unique_ptr<Reducer> Replica::State::make_counted_reducer(
    const NamedTensors& followed, const Source& from, std::unordered_map<const c10::TensorImpl*, size_t>& handles) {
  const auto count = [&](size_t sign) {
    for (const auto& [name, tensor] : followed) handles[tensor.unsafeGetTensorImpl()] += sign * tensor.use_count();
  };
  constexpr size_t kMinusOne = ~size_t{0};
  if (from.is_list()) count(kMinusOne);
  auto made = make_reducer(followed, from);
  if (!from.is_list()) return made;
  count(1);
  for (auto& [tensor, number] : handles) number += 3;  // of the list, `known` and `trained`
  // A hook of the old reducer holds the node that accumulates, and with it a handle that the new reducer takes over.
  for (const AttachedModel::Known& one : attached.known())
    if (const auto found = handles.find(one.tensor.unsafeGetTensorImpl()); found != handles.end() && one.followed)
      ++found->second;
  return made;
}

std::string Replica::State::problem_of(const AttachedModel::Tensors& now, const Source& from) const {
  for (const auto* list : {&now.parameters, &now.buffers})
    for (const auto& [name, tensor] : *list)
      if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes && (group.world_size() > 1 || tensor.requires_grad()))
        return (list == &now.parameters ? "parameter " : "buffer ") + name +
               " has several elements that share memory (expand()), so it cannot be set to another rank's values; "
               "clone() it, or name it in parameters_to_ignore";
  if (reducer != nullptr) return "";  // ignored tensors may be removed later
  if (std::string trouble = trouble_of(shared_weights_in(storages_of(tensors_of(now.parameters)))); !trouble.empty())
    return trouble;
  const NamedTensors all_parameters = from.parameters(), all_buffers = from.buffers();
  for (const std::string& ignored : options.parameters_to_ignore) {
    const auto is_it = [&](const auto& named) { return named.first == ignored; };
    if (std::none_of(all_parameters.begin(), all_parameters.end(), is_it) &&
        std::none_of(all_buffers.begin(), all_buffers.end(), is_it))
      return "parameters_to_ignore names " + ignored +
             ", which is neither a parameter nor a buffer of the module; give names as named_parameters() and "
             "named_buffers() list them";
  }
  return "";
}

std::unique_ptr<Reducer> Replica::State::make_reducer(const NamedTensors& followed, const Source& from) {
  const ReductionSettings settings{limits_of(options), options.reduction, number_, from.is_list(),
                                   /*buffers=*/!attached.buffers_of(from).empty()};
  return std::make_unique<Reducer>(
      followed, group, settings, *passes,
      ReductionEvents{.inspect = [this] { return attached.inspect(); },
                      .settings = [this] { return own_settings(); },
                      .frozen = [this] { return attached.frozen_names(); },
                      .reduced = [this](const std::vector<Facts>& ranks) { reduced(ranks); },
                      .reducing =
                          [this] {
                            if (join.statistics) join.statistics->announce_reduction();
                          },
                      .virtual_rank_done =
                          [this](bool took_part, bool last) {
                            if (auto* buffers = synchronization.virtual_buffers())
                              buffers->virtual_rank_done(took_part, last);
                          },
                      .backward_begins =
                          [this](bool gradients_wait) {
                            return shared_step != nullptr ? shared_step->backward_begins(gradients_wait) : "";
                          }});
}

ReplicaSettings Replica::State::own_settings() const {
  using Join = ReplicaSettings::Join;
  ReplicaSettings settings{.check_every = synchronization.checks_every(),
                           .buffers_as_left = synchronization.checks_buffers_as_left(),
                           .join = join.switched_off ? Join::kSwitchedOff : Join::kOutside,
                           .frozen = attached.frozen()};
  if (join.options == nullptr) return settings;
  settings.join = Join::kInside;
  settings.divide_by_initial_world_size = join.options->divide_by_initial_world_size;
  settings.throw_on_early_termination = join.options->throw_on_early_termination;
  return settings;
}

void Replica::State::reduced(const std::vector<Facts>& ranks) {
  memory.end_step();
  if (const std::string warning = attached.untrained_warning(); !warning.empty()) TORCH_WARN(warning);
  std::vector<bool> active, done;
  for (const Facts& facts : ranks) {
    active.push_back(facts.active);
    done.push_back(!facts.active);
  }
  const auto inputs = std::count(active.begin(), active.end(), true);
  if (inputs == 0) return;  // all ranks have reached the end of join()
  join.last_active = active;
  if (inputs != static_cast<int64_t>(active.size()) && join.options != nullptr &&
      join.options->throw_on_early_termination)
    throw Error(rank_names(done) + " ran out of inputs within join(throw_on_early_termination) while " +
                rank_names(active) + " had more");
  synchronization.after_reduction(ranks, /*step_looked=*/is_deferred());
}

SharedStep* Replica::State::deferred_step() const {
  const bool wants_sum = shared_step != nullptr && shared_step->wants_sum();
  return wants_sum && equipment.hook == nullptr && !several_virtual_ranks(group) ? shared_step : nullptr;
}

void Replica::State::set_shared_step(SharedStep* step) {
  shared_step = step;
  reducer->defer_to(deferred_step());
}

void Replica::State::throw_on_all_ranks(const std::string& trouble) const {
  constexpr char kObject = '\n';  // no trouble begins with it
  const auto all = group.all_gather_bytes(trouble.empty() ? kObject + std::to_string(number_) : trouble);
  std::vector<std::string> objects;
  for (const std::string& one : all) {
    if (one.front() != kObject) throw Error(ranks_with(all, one) + ": " + one);
    objects.push_back("number " + one.substr(1));
  }
  if (std::any_of(all.begin(), all.end(), [&](const std::string& one) { return one != all.front(); }))
    throw Error("the ranks are at different DistributedDataParallel objects: " + ranks_of_each(objects, "at ") +
                ", numbered in the order in which they were attached to this group. Call broadcast_parameters(), "
                "average_parameters() and refresh() of several objects in the same order on every rank");
}

void Replica::State::check_not_edited() { throw_on_all_ranks(attached.inspect()); }

}  // namespace lockstep
