#include <algorithm>
#include <sstream>

#include <ATen/ATen.h>

#include "base/operation_label.h"
#include "collectives/coalesced.h"
#include "collectives/rank_names.h"
#include "data_parallel/replica_state.h"
#include "data_parallel/same_model.h"
#include "data_parallel/tensor_memory.h"
#include "nn/batch_norm_operator.h"

// Attaching to a module, again after it was edited, and noticing that it was.

namespace lockstep {
namespace {

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

NamedTensors without(NamedTensors tensors, const std::vector<std::string>& names) {
  std::erase_if(tensors, [&](const auto& named) { return contains(names, named.first); });
  return tensors;
}

void check(const DistributedDataParallelOptions& options) {
  TORCH_CHECK(options.first_bucket_cap_mb > 0 && options.bucket_cap_mb > 0,
              "bucket_cap_mb and first_bucket_cap_mb must be positive; they are ", options.bucket_cap_mb, " and ",
              options.first_bucket_cap_mb);
}

/// One option a line, those in which ranks must not differ.
std::string describe(const DistributedDataParallelOptions& options) {
  std::ostringstream text;
  text << "first_bucket_cap_mb " << options.first_bucket_cap_mb << "\nbucket_cap_mb " << options.bucket_cap_mb
       << "\nreduction " << static_cast<int>(options.reduction) << "\nbuffers " << static_cast<int>(options.buffers)
       << "\nbroadcast_buffers " << options.broadcast_buffers << "\ninit_sync " << options.init_sync << '\n';
  for (const auto& name : options.delay_all_reduce_named_params) text << "delayed " << name << '\n';
  for (const auto& name : options.parameters_to_ignore) text << "ignored " << name << '\n';
  return text.str();
}

BucketLimits limits_of(const DistributedDataParallelOptions& options) {
  constexpr double kMebibyte = 1 << 20;
  return {static_cast<int64_t>(options.first_bucket_cap_mb * kMebibyte),
          static_cast<int64_t>(options.bucket_cap_mb * kMebibyte)};
}

std::string advice(const char* kind, const std::string& name, const char* what) {
  return c10::str(kind, " ", name, " ", what, " after DistributedDataParallel attached; call refresh() on all ranks");
}

/// The first tensor of `now` that is not among those of `before`, else the first of `before` that is gone; "" if they
/// are the same tensors.
std::string edit_of(const char* kind, const NamedTensors& before, const NamedTensors& now) {
  const auto holds = [](const NamedTensors& list, const at::Tensor& tensor) {
    return std::any_of(list.begin(), list.end(), [&](const auto& named) { return named.second.is_same(tensor); });
  };
  for (const auto& [name, tensor] : now)
    if (!holds(before, tensor)) return advice(kind, name, "was added or replaced");
  for (const auto& [name, tensor] : before)
    if (!holds(now, tensor)) return advice(kind, name, "was removed");
  return "";
}

}  // namespace

Replica::State::State(std::unique_ptr<Source> from, const Group& in, DistributedDataParallelOptions with)
    : group(in), options(std::move(with)) {
  check(options);
  keep_tensor_memory();
  check_same_on_all_ranks(group, "option", describe(options));
  attach(std::move(from));
}

void Replica::State::compare(const NamedTensors& parameters, const NamedTensors& new_buffers) const {
  const bool first = reducer == nullptr;
  const auto remark = [&](const at::Tensor& tensor) {
    const bool is_new = !is_known(tensor);
    return std::string(is_new && GradientHook::follows(tensor) ? ", already attached" : "") +
           (is_new && !first ? ", new" : "");
  };
  check_same_on_all_ranks(group, "parameter", parameters, remark);
  check_same_on_all_ranks(group, "buffer", new_buffers, remark);
  for (const auto& [name, tensor] : parameters)
    TORCH_CHECK(is_known(tensor) || !GradientHook::follows(tensor), "parameter ", name,
                " is attached to a DistributedDataParallel already; destroy that one first, or refresh() it");
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
              "the module has no parameter that requires grad, so there is nothing to keep "
              "in step; use it without DistributedDataParallel");
  const auto& delayed = options.delay_all_reduce_named_params;
  for (const auto& name : delayed)
    TORCH_CHECK(std::any_of(parameters.begin(), parameters.end(), [&](const auto& p) { return p.first == name; }),
                "delay_all_reduce_named_params names ", name, ", which is no parameter of the module");
  // The plan goes through the parameters backwards.
  std::stable_partition(followed.begin(), followed.end(), [&](const auto& p) { return contains(delayed, p.first); });
  return followed;
}

void Replica::State::attach(std::unique_ptr<Source> from) {
  TORCH_CHECK(passes.since_reduction == 0, "gradients of ", passes.since_reduction,
              " backward passes wait in .grad; reduce_gradients() before refresh()");
  const Source& now = from ? *from : *source;
  const NamedTensors parameters = without(now.parameters(), options.parameters_to_ignore);
  const NamedTensors new_buffers = without(now.buffers(), options.parameters_to_ignore);
  compare(parameters, new_buffers);
  check_weights(parameters);
  NamedTensors followed = to_follow(parameters);
  if (reducer || options.init_sync) {
    std::vector<at::Tensor> unknown;
    for (const auto* list : {&parameters, &new_buffers})
      for (const auto& [name, tensor] : *list)
        if (!is_known(tensor)) unknown.push_back(tensor);
    const OperationLabel label("the initial parameters");
    if (group.world_size() > 1) broadcast_coalesced(group, unknown, /*root=*/0);
  }
  const bool again = reducer != nullptr;
  reducer.reset();  // its hooks make room
  known.clear();
  impls_.clear();
  for (const auto& [name, tensor] : parameters)
    known.push_back({name, tensor, tensor.options(), tensor.requires_grad()});
  for (const auto* list : {&parameters, &new_buffers})
    for (const auto& [name, tensor] : *list) impls_.insert(tensor.unsafeGetTensorImpl());
  buffers = new_buffers;
  trained = std::move(followed);
  if (from) source = std::move(from);
  source->remember();
  reducer =
      std::make_unique<Reducer>(trained, group, Reducer::Settings{limits_of(options), options.reduction}, passes,
                                Reducer::Events{.inspect = [this] { return inspect(); },
                                                .reduced = [this](const std::vector<Facts>& ranks) { reduced(ranks); },
                                                .reducing =
                                                    [this] {
                                                      if (statistics) statistics->announce_reduction();
                                                    }});
  reducer->equip(equipment);
  if (again) reducer->adopt_gradients();
}

std::string Replica::State::inspect() {
  for (const Known& one : known) {
    if (one.tensor.requires_grad() && !one.followed) return advice("parameter", one.name, "was unfrozen");
    if (one.tensor.scalar_type() != one.options.dtype() || one.tensor.device() != one.options.device())
      return advice("parameter", one.name, "was converted");
  }
  if (!source->is_edited()) return "";
  NamedTensors parameters;
  for (const Known& one : known) parameters.emplace_back(one.name, one.tensor);
  std::string edit = edit_of("parameter", parameters, without(source->parameters(), options.parameters_to_ignore));
  if (edit.empty()) edit = edit_of("buffer", buffers, without(source->buffers(), options.parameters_to_ignore));
  if (edit.empty()) source->remember();  // layers that hold no tensors came or went
  return edit;
}

void Replica::State::check_not_edited() {
  const OperationLabel label("the search for edits of the model");
  const auto all = group.all_gather_bytes(inspect());
  for (const std::string& edit : all)
    if (!edit.empty()) throw Error(ranks_with(all, edit) + ": " + edit);
}

}  // namespace lockstep
