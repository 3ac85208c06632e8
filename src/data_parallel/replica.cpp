#include <lockstep/distributed_data_parallel.h>

#include <ATen/ATen.h>

#include "collectives/coalesced.h"
#include "data_parallel/same_model.h"
#include "reducer/reducer.h"

namespace lockstep {
namespace {

NamedTensors to_list(const torch::OrderedDict<std::string, at::Tensor>& dictionary) {
  NamedTensors list;
  for (const auto& item : dictionary) list.emplace_back(item.key(), item.value());
  return list;
}

std::vector<at::Tensor> tensors_of(const NamedTensors& named) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : named) tensors.push_back(tensor);
  return tensors;
}

NamedTensors with_gradient(NamedTensors parameters) {
  std::erase_if(parameters, [](const auto& parameter) { return !parameter.second.requires_grad(); });
  return parameters;
}

BucketLimits limits_of(const DistributedDataParallelOptions& options) {
  TORCH_CHECK(options.first_bucket_cap_mb > 0 && options.bucket_cap_mb > 0,
              "bucket_cap_mb and first_bucket_cap_mb must be positive; they are ", options.bucket_cap_mb, " and ",
              options.first_bucket_cap_mb);
  constexpr double kMebibyte = 1 << 20;
  return {static_cast<int64_t>(options.first_bucket_cap_mb * kMebibyte),
          static_cast<int64_t>(options.bucket_cap_mb * kMebibyte)};
}

}  // namespace

struct Replica::State {
  std::shared_ptr<torch::nn::Module> module;
  Group group;
  DistributedDataParallelOptions options;
  NamedTensors trained;              ///< parameters that require grad, in registration order
  bool synchronized = true;          ///< without a reducer, what no_sync() toggles
  std::unique_ptr<Reducer> reducer;  ///< none in a world of one: .grad is the mean already

  void synchronize_buffers() {
    if (options.broadcast_buffers) broadcast_coalesced(group, module->buffers(), /*root=*/0);
  }
};

Replica::Replica(std::shared_ptr<torch::nn::Module> module, const Group& group, DistributedDataParallelOptions options)
    : state_(new State{std::move(module), group, options, {}, true, nullptr}) {
  const NamedTensors parameters = to_list(state_->module->named_parameters());
  const BucketLimits limits = limits_of(options);
  check_same_on_all_ranks(group, "parameter", parameters);
  check_same_on_all_ranks(group, "buffer", to_list(state_->module->named_buffers()));
  state_->trained = with_gradient(parameters);
  TORCH_CHECK(!state_->trained.empty(),
              "the module has no parameter that requires grad, so there is nothing to keep "
              "in step; use it without DistributedDataParallel");
  if (group.world_size() == 1) return;
  broadcast_parameters(/*root=*/0);
  state_->reducer = std::make_unique<Reducer>(tensors_of(state_->trained), group, limits,
                                              [state = state_.get()] { state->synchronize_buffers(); });
}

Replica::~Replica() = default;

NoSyncGuard Replica::no_sync() {
  return NoSyncGuard(state_->reducer ? &state_->reducer->synchronized() : &state_->synchronized);
}

void Replica::broadcast_parameters(int root) {
  std::vector<at::Tensor> tensors = state_->module->parameters();
  for (const auto& buffer : state_->module->buffers()) tensors.push_back(buffer);
  broadcast_coalesced(state_->group, tensors, root);
}

double Replica::communication_seconds() const { return state_->reducer ? state_->reducer->waited_seconds() : 0; }

std::vector<std::vector<std::string>> Replica::bucket_parameters() const {
  std::vector<std::vector<std::string>> names;
  if (!state_->reducer) return names;
  for (const auto& bucket : state_->reducer->plan()) {
    names.emplace_back();
    for (size_t index : bucket) names.back().push_back(state_->trained[index].first);
  }
  return names;
}

}  // namespace lockstep
