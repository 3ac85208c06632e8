#include <lockstep/replica.h>

#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <torch/csrc/jit/api/module.h>

#include "base/rank_names.h"
#include "base/shared_weights.h"
#include "base/weights_set.h"
#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "collectives/machine_memory.h"
#include "collectives/storages.h"
#include "data_parallel/replica_state.h"
#include "rank_page/operation_label.h"

namespace lockstep {

Replica::Owner::Owner(std::unique_ptr<State> state) : state_(std::move(state)) {}
Replica::Owner::Owner(Owner&&) noexcept = default;
Replica::Owner::~Owner() = default;
Replica::State& Replica::Owner::operator*() const {
  TORCH_CHECK(state_ != nullptr, "this DistributedDataParallel was moved from; use the object that it was moved to");
  return *state_;
}

Replica::Replica(std::unique_ptr<State> state) : state_(std::move(state)) {}
Replica::Replica(std::shared_ptr<torch::nn::Module> module, const Group& group, DistributedDataParallelOptions options)
    : Replica(std::make_unique<State>(source_of(std::move(module)), group, std::move(options))) {}
Replica::Replica(const torch::jit::Module& module, const Group& group, DistributedDataParallelOptions options)
    : Replica(std::make_unique<State>(source_of(module), group, std::move(options))) {}
Replica::Replica(NamedTensors parameters, const Group& group, DistributedDataParallelOptions options)
    : Replica(std::make_unique<State>(source_of(std::move(parameters)), group, std::move(options))) {}
Replica::~Replica() = default;
Replica::Replica(Replica&&) noexcept = default;

std::vector<int> detail::ranks_of_replicas(const Replica& model) {
  const Group::State& group = state_of(state_of(model).group);
  std::vector<int> ranks;
  for (int rank = 0; rank < group.world_size; ++rank) ranks.push_back(group.number_of_all(rank));
  return ranks;
}

Replica::State& state_of(const Replica& replica) { return *replica.state_; }

NoSyncGuard Replica::no_sync() { return NoSyncGuard(state_->passes); }

Accumulation Replica::accumulate(int n) {
  TORCH_CHECK(n >= 1, "accumulate(", n, "): gradients are reduced in every n-th backward; n must be at least 1");
  state_->passes->last_accumulation = n;
  return Accumulation(state_->passes, n);
}

int Replica::last_accumulation() const { return state_->passes->last_accumulation; }

bool Replica::step_complete() const { return state_->passes->since_reduction == 0; }

void Replica::reduce_gradients() { state_->reducer->reduce(); }

void Replica::skip_step() {
  // Within join(), the others may call synchronised batch norms first.
  if (state_->join.statistics) state_->join.statistics->serve();
  state_->reducer->skip();
}

void Replica::set_weight(double weight) {
  TORCH_CHECK(state_->options.reduction == GradientReduction::kWeightedMean,
              "set_weight() needs DistributedDataParallelOptions::reduction = GradientReduction::kWeightedMean");
  TORCH_CHECK(std::isfinite(weight) && weight >= 0, "set_weight(): a weight is a number of samples or tokens, not ",
              weight);
  state_->reducer->set_weight(weight);
}

namespace {

/// Throws on all ranks if a parameter lies in shared memory on some ranks only: the others would write where that rank
/// no longer reads.
void check_places(const Group& group, const std::vector<AttachedModel::Known>& parameters, int root) {
  std::string shared;
  for (const auto& one : parameters) shared += is_owned_together(one.tensor) ? '1' : '0';
  const auto all = group.all_gather_bytes(shared);
  for (size_t i = 0; i < parameters.size(); ++i) {
    std::vector<bool> here, elsewhere;
    for (const std::string& one : all) here.push_back(one[i] == '1'), elsewhere.push_back(one[i] != '1');
    if (std::count(here.begin(), here.end(), here.front()) == static_cast<int64_t>(here.size())) continue;
    throw Error("broadcast_parameters(" + std::to_string(root) + "): parameter " + parameters[i].name +
                " lies in the memory that all ranks share on " + rank_names(here) + ", and no longer on " +
                rank_names(elsewhere) +
                ": torch::load(), vector_to_parameters(), set_data() and to() put other memory in its place. Copy into "
                "the parameter instead, on one rank, by load_state_dict() or by copy_() under torch::NoGradGuard");
  }
}

}  // namespace

void Replica::broadcast_parameters(int root) {
  State& state = *state_;
  TORCH_CHECK(root >= 0 && root < state.group.world_size(), "broadcast_parameters(", root,
              "): this group has ranks 0 to ", state.group.world_size() - 1);
  const OperationLabel label("broadcast_parameters()");
  state.check_not_edited();
  if (state.group.world_size() > 1) check_places(state.group, state.attached.known(), root);
  std::vector<at::Tensor> tensors;
  for (const auto& one : state.attached.known()) tensors.push_back(one.tensor);
  for (const auto& [name, buffer] : state.attached.buffers()) tensors.push_back(buffer);
  const auto storages = storages_of(tensors);
  for (SharedWeights* weights : shared_weights_in(storages)) weights->before_broadcast(root);
  if (state.group.world_size() > 1) broadcast_weights(state.group, tensors, root);
  note_weights_set(storages);
}

void Replica::average_parameters(double weight) {
  State& state = *state_;
  for (const auto& one : state.attached.known())
    TORCH_CHECK(!is_owned_together(one.tensor), "average_parameters(): parameter ", one.name,
                " lies in memory that all ranks share, so there is one value of it; make the "
                "ZeroRedundancyOptimizer with shared_parameters = false");
  const OperationLabel label("average_parameters()");
  state.check_not_edited();
  const at::Tensor weights = state.group.all_gather(at::scalar_tensor(weight, at::kDouble));
  const double total = weights.sum().item<double>();
  std::vector<bool> wrong;
  for (int rank = 0; rank < state.group.world_size(); ++rank)
    wrong.push_back(!std::isfinite(weights[rank].item<double>()) || weights[rank].item<double>() < 0);
  const bool none = std::find(wrong.begin(), wrong.end(), true) == wrong.end();
  if (!none || total == 0)
    throw Error(
        "average_parameters: weights must be finite and not negative, and at least one must be above 0; they are not "
        "on " +
        rank_names(none ? std::vector<bool>(wrong.size(), true) : wrong));
  NamedTensors tensors = state.attached.buffers();
  for (const auto& one : state.attached.known()) tensors.emplace_back(one.name, one.tensor);
  if (state.group.world_size() > 1) state.synchronization.average(tensors, weight / total, /*root=*/0);
  note_weights_set({});
}

void Replica::refresh() { state_->attach(nullptr); }

void Replica::refresh(NamedTensors parameters) { state_->attach(source_of(std::move(parameters))); }

void Replica::check_divergence_every(int every_n_steps, const DivergenceOptions& options) {
  TORCH_CHECK(every_n_steps >= 0, "check_divergence_every(", every_n_steps,
              "): give the number of steps between two checks, or 0 for no checks");
  state_->synchronization.check_every(every_n_steps, options.buffers_as_left);
}

void Replica::check_divergence() const { state_->synchronization.check_divergence(); }

const std::vector<std::string>& Replica::parameters_to_ignore() const { return state_->options.parameters_to_ignore; }

double Replica::communication_seconds() const { return state_->reducer->waited_seconds(); }

std::vector<std::vector<std::string>> Replica::bucket_parameters() const {
  std::vector<std::vector<std::string>> names;
  for (const auto& bucket : state_->reducer->plan()) {
    names.emplace_back();
    for (size_t index : bucket) names.back().push_back(state_->attached.trained()[index].first);
  }
  return names;
}

void Replica::keeps_list(const NamedTensors& list) const { state_->attached.set_kept_list(&list); }

void Replica::hands_out_list() const { state_->attached.set_kept_list(nullptr); }

void Replica::before_forward() {
  State& state = *state_;
  TORCH_CHECK(state.group.is_open(),
              "forward of a DistributedDataParallel whose group is gone: its Context was destroyed; let the Context "
              "outlive the model");
  if (!at::GradMode::is_enabled() || !state.attached.source().is_training()) return;
  if (auto* buffers = state.synchronization.virtual_buffers()) buffers->before_forward();
  const std::string edit = state.attached.inspect();
  if (!edit.empty()) state.reducer->fail(edit);
}

}  // namespace lockstep
