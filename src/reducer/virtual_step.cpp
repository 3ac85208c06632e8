#include "reducer/virtual_step.h"

#include <algorithm>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace lockstep {
namespace {

/// a + b, in place where possible. An undefined tensor counts as zeros, whose sum with -0 is 0.
at::Tensor sum_of(at::Tensor a, at::Tensor b) {
  if (!a.defined() && !b.defined()) return a;
  if (!a.defined()) return b.add_(0);
  return b.defined() ? a.add_(b) : a.add_(0);
}

}  // namespace

at::ScalarType sum_type(at::ScalarType type) { return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type; }

VirtualStep::VirtualStep(std::shared_ptr<VirtualRanks> ranks, const std::vector<at::Tensor>& parameters,
                         Settings settings)
    : ranks_(std::move(ranks)), settings_(settings), plan_(plan_combination(ranks_->world_size(), ranks_->count())) {
  for (const at::Tensor& parameter : parameters) sums_.push_back({.parameter = parameter, .before = {}, .pieces = {}});
}

void VirtualStep::begin() {
  if (std::exchange(begun_, true)) return;
  for (Sum& sum : sums_) sum.before = sum.parameter.grad();
}

void VirtualStep::before_accumulation(size_t parameter) {
  begin();
  const Sum& sum = sums_[parameter];
  at::Tensor& gradient = sum.parameter.mutable_grad();
  if (sum.added || !gradient.defined() || !gradient.is_same(sum.before)) return;
  at::NoGradGuard no_grad;
  if (counts_before())
    gradient = gradient.clone();
  else
    gradient.reset();
}

at::Tensor VirtualStep::summand(at::Tensor gradient, const Leaf& leaf) const {
  if (leaf.weight != 1) leaf.weight == 0 ? gradient.zero_() : gradient.mul_(leaf.weight);
  if (leaf.travels_as && *leaf.travels_as != gradient.scalar_type()) {
    at::Tensor compressed = at::empty_like(gradient, gradient.options().dtype(*leaf.travels_as));
    if (settings_.mean)
      at::div_out(compressed, gradient, at::scalar_tensor(ranks_->count(), gradient.options()));
    else
      compressed.copy_(gradient);
    gradient = compressed;
  }
  return gradient.to(sum_type(gradient.scalar_type()));
}

void VirtualStep::push(Sum& sum, at::Tensor value) const {
  sum.pieces.push_back(std::move(value));
  for (int n = sums_completed_by(virtual_rank(), ranks_->block(), ranks_->count()); n > 0; --n) {
    at::Tensor right = std::move(sum.pieces.back());
    sum.pieces.pop_back();
    sum.pieces.back() = sum_of(std::move(sum.pieces.back()), std::move(right));
  }
  sum.added = true;
}

void VirtualStep::add(size_t parameter, bool used, const Leaf& leaf) {
  at::NoGradGuard no_grad;
  Sum& sum = sums_[parameter];
  at::Tensor& gradient = sum.parameter.mutable_grad();
  at::Tensor value;
  if (used && gradient.defined()) {
    value = summand(std::exchange(gradient, sum.before), leaf);
    sum.used = true;
  } else if (sum.before.defined() && counts_before()) {
    value = summand(sum.before.clone(), leaf);
  }
  push(sum, std::move(value));
}

bool VirtualStep::any_added() const { return std::any_of(sums_.begin(), sums_.end(), std::mem_fn(&Sum::added)); }

bool VirtualStep::is_late(size_t parameter) const {
  const Sum& sum = sums_[parameter];
  const at::Tensor& gradient = sum.parameter.grad();
  return sum.added && gradient.defined() && !gradient.is_same(sum.before);
}

void VirtualStep::add_late(size_t parameter, const Leaf& leaf) {
  at::NoGradGuard no_grad;
  Sum& sum = sums_[parameter];
  at::Tensor value = summand(std::exchange(sum.parameter.mutable_grad(), sum.before), leaf);
  sum.pieces.back() = sum_of(std::move(sum.pieces.back()), std::move(value));
}

void VirtualStep::add_nothing(size_t parameter) {
  at::NoGradGuard no_grad;
  if (!sums_[parameter].added) push(sums_[parameter], at::Tensor());
}

void VirtualStep::drop_leaf() {
  begin();
  for (Sum& sum : sums_) sum.parameter.mutable_grad() = sum.before;
}

void VirtualStep::end_leaf(const Facts& facts) {
  facts_.push_back(facts);
  for (Sum& sum : sums_) sum.added = false;
  ++leaf_;
  passes = counted = 0;
  completes = false;
}

at::Tensor VirtualStep::finished(at::Tensor sum, at::ScalarType type,
                                 std::optional<at::ScalarType> travelled_as) const {
  const bool compressed = travelled_as && *travelled_as != type;
  if (settings_.mean && !compressed) sum.div_(ranks_->count());
  if (compressed) sum = sum.to(*travelled_as);
  return sum.to(type);
}

bool VirtualStep::sums_in_place(at::ScalarType type, std::optional<at::ScalarType> travels_as) const {
  return plan_.is_tree_over_ranks && sum_type(type) == type && travels_as.value_or(type) == type;
}

void VirtualStep::reset() {
  for (Sum& sum : sums_) {
    sum.before.reset();
    sum.pieces.clear();
    sum.added = sum.used = false;
  }
  facts_.clear();
  trouble.clear();
  leaf_ = passes = counted = 0;
  begun_ = completes = false;
  local_only = true;
}

}  // namespace lockstep
