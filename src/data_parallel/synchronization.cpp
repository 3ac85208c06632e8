#include "data_parallel/synchronization.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "data_parallel/divergence.h"
#include "rank_page/operation_label.h"
#include "reducer/reduction_plan.h"

namespace lockstep {

void Synchronization::follow_buffers() {
  auto ranks = several_virtual_ranks(group_);
  if (!ranks || model_.buffers().empty()) return;
  TORCH_CHECK(options_.buffers == BufferPolicy::kFollowRankZero,
              "where a rank works for several virtual ranks, buffers follow virtual rank 0; leave "
              "DistributedDataParallelOptions::buffers at kFollowRankZero, or start as many ranks as virtual ranks");
  virtual_buffers_ = std::make_unique<VirtualBuffers>(model_.buffers(), ranks);
}

void Synchronization::after_reduction(const std::vector<Facts>& ranks, bool step_looked) {
  if (is_void(ranks)) ++void_steps_;
  // The forward of a skipped batch may have left anything in the buffers.
  std::vector<bool> active, took_part;
  for (const Facts& facts : ranks) active.push_back(facts.active), took_part.push_back(facts.took_part());
  const bool all = std::find(active.begin(), active.end(), false) == active.end();
  const bool any = std::find(took_part.begin(), took_part.end(), true) != took_part.end();
  const bool due = check_every_ > 0 && all && ++reductions_ % check_every_ == 0;
  const bool all_took_part = std::find(took_part.begin(), took_part.end(), false) == took_part.end();
  if (due && check_buffers_as_left_ && all_took_part && !virtual_buffers_) check_buffers(/*as_left=*/true);
  synchronize_buffers(any ? took_part : active);
  if (virtual_buffers_) virtual_buffers_->step_done();
  if (due) step_looked ? check_buffers(/*as_left=*/false) : check_divergence();
}

void Synchronization::check_every(int n_steps, bool buffers_as_left) {
  check_every_ = n_steps;
  check_buffers_as_left_ = buffers_as_left;
  reductions_ = 0;
}

void Synchronization::check_before_step(bool counted_later) const {
  if (check_every_ == 0 || (reductions_ + (counted_later ? 1 : 0)) % check_every_ != 0) return;
  // Buffers are synchronised, and then compared, when a deferred reduction ends.
  check_equal_on_all_ranks(group_, named_parameters());
}

NamedTensors Synchronization::named_parameters() const {
  NamedTensors tensors;
  for (const AttachedModel::Known& one : model_.known()) tensors.emplace_back("parameter " + one.name, one.tensor);
  return tensors;
}

void Synchronization::synchronize_buffers(const std::vector<bool>& counts) const {
  if (model_.buffers().empty() || group_.world_size() == 1) return;
  auto root = static_cast<int>(std::find(counts.begin(), counts.end(), true) - counts.begin());
  if (const auto& ranks = state_of(group_).virtual_ranks) root = ranks->owner(root);
  const OperationLabel label("the buffers");
  switch (options_.buffers) {
    case BufferPolicy::kNone:
      return;
    case BufferPolicy::kFollowRankZero: {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, buffer] : model_.buffers()) tensors.push_back(buffer);
      return broadcast_coalesced(group_, tensors, root);
    }
    case BufferPolicy::kMean: {
      const auto counted = static_cast<double>(std::count(counts.begin(), counts.end(), true));
      return average(model_.buffers(), counts[static_cast<size_t>(group_.rank())] ? 1 / counted : 0, root);
    }
  }
}

void Synchronization::average(const NamedTensors& tensors, double share, int root) const {
  std::vector<at::Tensor> numbers, others;
  for (const auto& [name, tensor] : tensors)
    (tensor.is_floating_point() || tensor.is_complex() ? numbers : others).push_back(tensor);
  average_coalesced(group_, numbers, share);
  broadcast_coalesced(group_, others, root);
}

void Synchronization::check_buffers(bool as_left) const {
  if (!as_left && options_.buffers == BufferPolicy::kNone) return;
  const NamedTensors& buffers = model_.buffers();
  const auto is_there = [&](const std::string& name) {
    return std::any_of(buffers.begin(), buffers.end(), [&](const auto& named) { return named.first == name; });
  };
  // Each rank's batches have different statistics.
  const auto is_of_batch_norm = [&](const std::string& name) {
    const std::string layer = name.substr(0, name.rfind('.') + 1), last = name.substr(layer.size());
    return (last == "running_mean" || last == "running_var" || last == "num_batches_tracked") &&
           is_there(layer + "running_mean") && is_there(layer + "running_var") &&
           is_there(layer + "num_batches_tracked");
  };
  NamedTensors tensors;
  for (const auto& [name, buffer] : buffers)
    if (!as_left || !is_of_batch_norm(name)) tensors.emplace_back("buffer " + name, buffer);
  if (!tensors.empty()) check_equal_on_all_ranks(group_, tensors);
}

void Synchronization::check_divergence() const {
  NamedTensors tensors = named_parameters();
  if (options_.buffers != BufferPolicy::kNone)
    for (const auto& [name, buffer] : model_.buffers()) tensors.emplace_back("buffer " + name, buffer);
  check_equal_on_all_ranks(group_, tensors);
}

}  // namespace lockstep
