#include <cmath>
#include <limits>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <lockstep/comm_hook.h>
#include <lockstep/observer.h>
#include <lockstep/replica.h>

#include "data_parallel/replica_state.h"

// What a user may add to the reduction of gradients.

namespace lockstep {
namespace {

/// All gradients, in pieces: a bucket as a whole if all its gradients lie in it, the others one by one.
std::vector<at::Tensor> pieces_of_gradients(const Reducer& reducer, const NamedTensors& followed,
                                            const std::vector<at::Tensor>& others) {
  std::vector<at::Tensor> pieces;
  const auto add = [&](const at::Tensor& gradient) {
    if (gradient.defined() && gradient.numel() > 0) pieces.push_back(gradient);
  };
  for (size_t b = 0; b < reducer.plan().size(); ++b) {
    const Bucket& bucket = reducer.buckets()[b];
    bool whole = true;
    for (size_t slot = 0; slot < bucket.size(); ++slot) whole = whole && bucket.gradient_here(slot).defined();
    if (whole) {
      add(bucket.gradients());
      continue;
    }
    for (const size_t parameter : reducer.plan()[b]) add(followed[parameter].second.grad());
  }
  if (reducer.plan().empty())  // a world of one
    for (const auto& [name, tensor] : followed) add(tensor.grad());
  for (const at::Tensor& tensor : others) add(tensor.grad());
  return pieces;
}

}  // namespace

void Replica::register_comm_hook(std::shared_ptr<CommHook> hook) {
  Reducer::Equipment equipment = state_->equipment;
  equipment.hook = std::move(hook);
  state_->reducer->equip(equipment);
  state_->equipment = std::move(equipment);
}

std::shared_ptr<CommHook> Replica::comm_hook() const { return state_->equipment.hook; }

double Replica::clip_grad_norm(double max_norm, double norm_type) {
  TORCH_CHECK(max_norm >= 0 && norm_type > 0, "clip_grad_norm(", max_norm, ", ", norm_type,
              "): max_norm must not be negative, norm_type must be positive or infinity");
  TORCH_CHECK(state_->passes.since_reduction == 0, "clip_grad_norm: .grad holds gradients of ",
              state_->passes.since_reduction,
              " backward passes that are not reduced yet, so each rank would scale them differently; clip after the "
              "backward that reduces them, or call reduce_gradients() first");
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> others;
  for (const State::Known& one : state_->known)
    if (!one.followed) others.push_back(one.tensor);
  const auto pieces = pieces_of_gradients(*state_->reducer, state_->trained, others);
  if (pieces.empty()) return 0;
  std::vector<at::Tensor> norms;
  for (const at::Tensor& piece : pieces) norms.push_back(at::norm(piece, norm_type).to(at::kCPU, at::kDouble));
  const double total = at::norm(at::stack(norms), norm_type).item<double>();
  const double factor = max_norm / (total + 1e-6);
  if (std::isnan(factor) || factor < 1)
    for (const at::Tensor& piece : pieces) piece.mul_(factor);
  return total;
}

void Replica::set_non_finite_policy(NonFinitePolicy policy) {
  state_->equipment.watch = policy == NonFinitePolicy::kIgnore ? nullptr : std::make_shared<NonFiniteWatch>(policy);
  state_->reducer->equip(state_->equipment);
}

int64_t Replica::skipped_steps() const {
  return state_->void_steps + (state_->equipment.watch ? state_->equipment.watch->skipped() : 0);
}

ReductionStats Replica::stats() const {
  ReductionStats stats = state_->equipment.timeline->stats();
  const auto names = bucket_parameters();
  for (size_t b = 0; b < names.size(); ++b) {
    const int64_t bytes = state_->reducer->buckets()[b].bytes();
    stats.bytes += bytes;
    if (b >= stats.buckets.size()) continue;
    stats.buckets[b].parameters = names[b];
    stats.buckets[b].bytes = bytes;
  }
  return stats;
}

void Replica::set_rank_comparison(bool on) { state_->equipment.timeline->set_rank_comparison(on); }

void Replica::set_observer(std::shared_ptr<Observer> observer) {
  state_->equipment.timeline->set_observer(std::move(observer));
}

}  // namespace lockstep
