#include "reducer/buckets.h"

#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/facts.h"

namespace lockstep {

Buckets::Buckets(const ReductionPlan& plan, const ReductionEquipment& equipment, RankMessage& message)
    : plan_(plan), equipment_(equipment), message_(message) {
  for (const auto& members : plan.buckets) {
    std::vector<at::Tensor> tensors;
    for (const size_t parameter : members) tensors.push_back(plan.tensors[parameter]);
    const bool last = buckets_.size() + 1 == plan.buckets.size();
    buckets_.emplace_back(std::move(tensors), plan.group,
                          /*notes=*/last ? static_cast<int64_t>(plan.rank_of_row.size()) * kFactElements : 0);
  }
}

GradientSlot& Buckets::slot_of(size_t parameter) {
  const auto [bucket, slot] = plan_.places[parameter];
  return buckets_[bucket].slot(slot);
}

const GradientSlot& Buckets::slot_of(size_t parameter) const {
  const auto [bucket, slot] = plan_.places[parameter];
  return buckets_[bucket].slot(slot);
}

void Buckets::fill(size_t parameter, bool used) {
  const auto [bucket, slot] = plan_.places[parameter];
  const bool counts = used || !plan_.rank_zero_adds_it();
  if (equipment_.watch && used) equipment_.watch->look(parameter, plan_.tensors[parameter].grad());
  if (const char* problem = buckets_[bucket].fill(slot, used, counts)) message_.note_trouble(parameter, problem);
  note_filled(bucket);
}

void Buckets::note_filled(size_t bucket) const {
  if (equipment_.timeline && buckets_[bucket].full()) equipment_.timeline->ready(bucket);
}

void Buckets::fill_rest(const std::vector<bool>& used) {
  for (size_t i = 0; i < plan_.places.size() && !buckets_.empty(); ++i)
    if (!slot_of(i).is_filled()) fill(i, used[i]);
}

void Buckets::fill_with_zeros(size_t begin) {
  for (size_t b = begin; b < buckets_.size(); ++b) buckets_[b].fill_with_zeros();
}

void Buckets::multiply(double factor) {
  if (factor == 1) return;
  at::NoGradGuard no_grad;
  for (Bucket& bucket : buckets_) bucket.gradients().mul_(factor);
}

void Buckets::apply_weight(Bucket& bucket) const {
  const double weight = message_.weight();
  if (weight != 1) weight == 0 ? bucket.gradients().zero_() : bucket.gradients().mul_(weight);
}

std::vector<at::Tensor> Buckets::finish() {
  std::vector<at::Tensor> kept;
  for (size_t b = 0; b < buckets_.size(); ++b)
    for (const size_t slot : buckets_[b].finish()) kept.push_back(plan_.tensors[plan_.buckets[b][slot]]);
  return kept;
}

void Buckets::reset() {
  for (Bucket& bucket : buckets_) bucket.reset();
}

}  // namespace lockstep
