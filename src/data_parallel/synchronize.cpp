#include <algorithm>
#include <cmath>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "base/rank_names.h"
#include "collectives/coalesced.h"
#include "collectives/group_state.h"
#include "data_parallel/divergence.h"
#include "data_parallel/replica_state.h"
#include "rank_page/operation_label.h"

// What keeps parameters and buffers equal on all ranks besides the reduction of gradients.

namespace lockstep {

void Replica::State::reduced(const std::vector<Facts>& ranks) {
  memory.end_step();
  if (const std::string warning = untrained_.after_reduction(); !warning.empty()) TORCH_WARN(warning);
  std::vector<bool> active, done;
  for (const Facts& facts : ranks) {
    active.push_back(facts.active);
    done.push_back(!facts.active);
  }
  const auto inputs = std::count(active.begin(), active.end(), true);
  if (inputs == 0) return;  // all ranks have reached the end of join()
  last_active = active;
  const bool all = inputs == static_cast<int64_t>(active.size());
  if (!all && join != nullptr && join->throw_on_early_termination)
    throw Error(rank_names(done) + " ran out of inputs within join(throw_on_early_termination) while " +
                rank_names(active) + " had more");
  if (is_void(ranks)) ++void_steps;
  // The forward of a batch that is skipped may have left anything in the buffers.
  std::vector<bool> took_part;
  for (const Facts& facts : ranks) took_part.push_back(facts.took_part());
  const bool any = std::find(took_part.begin(), took_part.end(), true) != took_part.end();
  const bool due = check_every > 0 && all && ++reductions % check_every == 0;
  const bool all_took_part = std::find(took_part.begin(), took_part.end(), false) == took_part.end();
  if (due && check_buffers_as_left && all_took_part && !virtual_buffers) check_buffers(/*as_left=*/true);
  synchronize_buffers(any ? took_part : active);
  if (virtual_buffers) virtual_buffers->step_done();
  // Where an optimizer sums gradients, it has looked at parameters before it wrote those of all ranks.
  if (due) is_deferred() ? check_buffers(/*as_left=*/false) : check_divergence();
}

void Replica::State::check_before_step() const {
  // A deferred reduction is counted after the step.
  if (check_every == 0 || (reductions + (is_deferred() ? 1 : 0)) % check_every != 0) return;
  NamedTensors tensors;  // buffers are synchronised, and then compared, when a deferred reduction ends
  for (const Known& one : known) tensors.emplace_back("parameter " + one.name, one.tensor);
  check_equal_on_all_ranks(group, tensors);
}

void Replica::State::synchronize_buffers(const std::vector<bool>& counts) {
  if (buffers.empty() || group.world_size() == 1) return;
  auto root = static_cast<int>(std::find(counts.begin(), counts.end(), true) - counts.begin());
  if (const auto& ranks = lockstep::state_of(group).virtual_ranks) root = ranks->owner(root);
  const OperationLabel label("the buffers");
  switch (options.buffers) {
    case BufferPolicy::kNone:
      return;
    case BufferPolicy::kFollowRankZero: {
      std::vector<at::Tensor> tensors;
      for (const auto& [name, buffer] : buffers) tensors.push_back(buffer);
      return broadcast_coalesced(group, tensors, root);
    }
    case BufferPolicy::kMean: {
      const auto counted = static_cast<double>(std::count(counts.begin(), counts.end(), true));
      return average(buffers, counts[static_cast<size_t>(group.rank())] ? 1 / counted : 0, root);
    }
  }
}

void Replica::State::average(const NamedTensors& tensors, double share, int root) {
  std::vector<at::Tensor> numbers, others;
  for (const auto& [name, tensor] : tensors)
    (tensor.is_floating_point() || tensor.is_complex() ? numbers : others).push_back(tensor);
  average_coalesced(group, numbers, share);
  broadcast_coalesced(group, others, root);
}

void Replica::State::check_buffers(bool as_left) const {
  if (!as_left && options.buffers == BufferPolicy::kNone) return;
  const auto is_there = [&](const std::string& name) {
    return std::any_of(buffers.begin(), buffers.end(), [&](const auto& named) { return named.first == name; });
  };
  // Each rank's batches have statistics of their own.
  const auto is_of_batch_norm = [&](const std::string& name) {
    const std::string layer = name.substr(0, name.rfind('.') + 1), last = name.substr(layer.size());
    return (last == "running_mean" || last == "running_var" || last == "num_batches_tracked") &&
           is_there(layer + "running_mean") && is_there(layer + "running_var") &&
           is_there(layer + "num_batches_tracked");
  };
  NamedTensors tensors;
  for (const auto& [name, buffer] : buffers)
    if (!as_left || !is_of_batch_norm(name)) tensors.emplace_back("buffer " + name, buffer);
  if (!tensors.empty()) check_equal_on_all_ranks(group, tensors);
}

void Replica::State::check_divergence() const {
  NamedTensors tensors;
  for (const Known& one : known) tensors.emplace_back("parameter " + one.name, one.tensor);
  if (options.buffers != BufferPolicy::kNone)
    for (const auto& [name, buffer] : buffers) tensors.emplace_back("buffer " + name, buffer);
  check_equal_on_all_ranks(group, tensors);
}

}  // namespace lockstep
