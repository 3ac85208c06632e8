#include <algorithm>
#include <cmath>
#include <limits>
#include <typeinfo>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Type.h>
#include <lockstep/comm_hook.h>
#include <lockstep/observer.h>
#include <lockstep/replica.h>

#include "base/text.h"
#include "collectives/group_state.h"
#include "data_parallel/gradient_norm.h"
#include "data_parallel/replica_state.h"
#include "rank_page/operation_label.h"

// Functions for user additions to the reduction of gradients.

namespace lockstep {
namespace {

/// All gradients, in pieces: a bucket as a whole if all its gradients lie in it, the others one by one. In a world of
/// one there are no buckets. `one_by_one`: none as a whole, so that sums over pieces do not depend on the number of
/// ranks.
std::vector<at::Tensor> pieces_of_gradients(const Reducer& reducer, const NamedTensors& followed,
                                            const std::vector<at::Tensor>& others, bool one_by_one) {
  std::vector<at::Tensor> pieces;
  const auto add = [&](const at::Tensor& gradient) {
    if (gradient.defined() && gradient.numel() > 0) pieces.push_back(gradient);
  };
  for (size_t b = 0; b < reducer.plan().size() && !one_by_one; ++b) {
    const Bucket& bucket = reducer.buckets()[b];
    bool whole = true;
    for (size_t slot = 0; slot < bucket.size(); ++slot) whole = whole && bucket.slot(slot).gradient_here().defined();
    if (whole) {
      add(bucket.gradients());
      continue;
    }
    for (const size_t parameter : reducer.plan()[b]) add(followed[parameter].second.grad());
  }
  if (reducer.plan().empty() || one_by_one)
    for (const auto& [name, tensor] : followed) add(tensor.grad());
  for (const at::Tensor& tensor : others) add(tensor.grad());
  return pieces;
}

/// For CPU gradients, gives the same bits as a step that ranks share.
double norm_of(const NamedTensors& followed, const std::vector<at::Tensor>& others,
               const std::vector<at::Tensor>& pieces, double type) {
  if (std::all_of(pieces.begin(), pieces.end(), GradientNorm::takes)) {
    GradientNorm norm(type);
    for (const auto& [name, tensor] : followed)
      if (tensor.grad().defined()) norm.add(tensor.grad());
    for (const at::Tensor& tensor : others)
      if (tensor.grad().defined()) norm.add(tensor.grad());
    return norm.norm();
  }
  std::vector<at::Tensor> norms;
  for (const at::Tensor& piece : pieces) norms.push_back(at::norm(piece, type).to(at::kCPU, at::kDouble));
  return at::norm(at::stack(norms), type).item<double>();
}

/// A hook that differs on one rank would send different data, or reduce the same gradients differently.
void check_same_hook(const Group& group, const CommHook* hook) {
  if (group.world_size() == 1) return;
  const OperationLabel label("register_comm_hook()");
  std::string text = "type: none\n";
  if (hook != nullptr) text = "type: " + c10::demangle(typeid(*hook).name()) + '\n' + hook->describe();
  const std::string difference = first_difference("fact", group.all_gather_bytes(text));
  if (!difference.empty())
    throw Error("register_comm_hook(): the ranks have registered different hooks: " + difference +
                ". Every rank must register a hook of the same type with the same options");
}

}  // namespace

void Replica::register_comm_hook(std::shared_ptr<CommHook> hook) {
  check_same_hook(state_->group, hook.get());
  ReductionEquipment equipment = state_->equipment;
  equipment.hook = std::move(hook);
  if (equipment.hook) state_->reducer->defer_to(nullptr);
  state_->reducer->equip(equipment);
  state_->equipment = std::move(equipment);
  if (state_->is_deferred()) state_->reducer->defer_to(state_->shared_step);
}

std::shared_ptr<CommHook> Replica::comm_hook() const { return state_->equipment.hook; }

double Replica::clip_grad_norm(double max_norm, double norm_type) {
  TORCH_CHECK(max_norm >= 0 && norm_type > 0, "clip_grad_norm(", max_norm, ", ", norm_type,
              "): max_norm must not be negative, norm_type must be positive or infinity");
  TORCH_CHECK(state_->passes->since_reduction == 0, "clip_grad_norm: .grad holds gradients of ",
              counted(state_->passes->since_reduction, "backward pass", "backward passes"),
              " that are not reduced yet, so each rank would scale them differently; clip after the "
              "backward that reduces them, or call reduce_gradients() first");
  TORCH_CHECK(
      !state_->reducer->has_scaled_gradients(),
      "clip_grad_norm: the gradients still have the scale of a GradScaler, so their norm would have it, too; call "
      "scaler.unscale(optimizer) first, on every rank");
  if (state_->is_deferred()) return state_->shared_step->clip_grad_norm(max_norm, norm_type);
  at::NoGradGuard no_grad;
  std::vector<at::Tensor> others;
  for (const AttachedModel::Known& one : state_->attached.known())
    if (!one.followed) others.push_back(one.tensor);
  const auto pieces = pieces_of_gradients(*state_->reducer, state_->attached.trained(), others,
                                          lockstep::state_of(state_->group).virtual_ranks != nullptr);
  if (pieces.empty()) return 0;
  const double total = norm_of(state_->attached.trained(), others, pieces, norm_type);
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
  return state_->synchronization.void_steps() + (state_->equipment.watch ? state_->equipment.watch->skipped() : 0);
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
