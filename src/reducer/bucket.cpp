#include "reducer/bucket.h"

#include <cstring>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/bucket_plan.h"

namespace lockstep {

Bucket::Bucket(std::vector<at::Tensor> parameters, const Group& group, int64_t notes) : missing_(parameters.size()) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters.size());
  std::vector<int64_t> numbers;
  for (const auto& parameter : parameters) numbers.push_back(parameter.numel());
  const std::vector<int64_t> places = bucket_layout(numbers, parameters.front().element_size());
  const int64_t elements = places.back();
  const bool apart = !parameters.front().is_cpu();
  flat_ = group.allocate(elements + (apart ? 0 : count + notes), parameters.front().options().requires_grad(false));
  gradients_ = flat_.narrow(0, 0, elements);
  tail_ = apart ? at::empty({count + notes}, at::kFloat) : flat_.narrow(0, elements, count + notes);
  used_ = tail_.narrow(0, 0, count);
  notes_ = tail_.narrow(0, count, notes);
  for (size_t i = 0; i < parameters.size(); ++i) slots_.emplace_back(std::move(parameters[i]), flat_, places[i]);
  clear_gaps();
}

void Bucket::clear_gaps() const {
  int64_t end = 0;
  for (size_t i = 0; i < slots_.size(); ++i) {
    const int64_t begin = offset_of(i);
    if (begin > end && flat_.is_cpu())
      std::memset(
          static_cast<std::byte*>(gradients_.mutable_data_ptr()) + static_cast<size_t>(end) * gradients_.itemsize(), 0,
          static_cast<size_t>(begin - end) * gradients_.itemsize());
    else if (begin > end)
      gradients_.narrow(0, end, begin - end).zero_();
    end = begin + slots_[i].elements();
  }
}

const char* Bucket::fill(size_t index, bool used, bool counts) {
  constexpr size_t kAhead = 2;  // gradients come in the order of the plan, as a rule
  if (index + 2 * kAhead < slots_.size()) {
    __builtin_prefetch(&slots_[index + 2 * kAhead]);
    slots_[index + kAhead].prefetch();
  }
  GradientSlot& slot = slots_[index];
  if (!slot.is_filled()) --missing_;
  const char* why = slot.fill(used, counts);
  if (!flat_.is_cpu()) streams_.note(flat_.device());
  return why;
}

at::Tensor Bucket::place_in(const at::Tensor& flat, size_t index) const {
  return gradient_in(flat, flat.storage_offset() + offset_of(index), slots_[index].gradient());
}

void Bucket::fill_sum(size_t index, const at::Tensor* sum, bool used) {
  at::NoGradGuard no_grad;
  GradientSlot& slot = slots_[index];
  if (!slot.is_filled()) --missing_;
  slot.fill_sum(sum, used);
}

void Bucket::fill_with_zeros() {
  at::NoGradGuard no_grad;
  for (GradientSlot& slot : slots_) slot.keep_unused();
  gradients_.zero_();
  missing_ = 0;
}

void Bucket::write_flags() {
  streams_.follow();
  bool all_used = true;
  for (const GradientSlot& slot : slots_) all_used = all_used && slot.is_used();
  used_.fill_(1);
  for (size_t i = 0; !all_used && i < slots_.size(); ++i)
    if (!slots_[i].is_used()) used_[static_cast<int64_t>(i)].zero_();
}

void Bucket::let_go_of_gradients() {
  for (GradientSlot& slot : slots_) slot.let_go_of_gradient();
}

bool Bucket::set_aside_late() {
  for (size_t i = 0; i < slots_.size(); ++i)
    if (at::Tensor late = slots_[i].set_aside_late(); late.defined()) {
      late_.resize(slots_.size());
      late_[i] = std::move(late);
    }
  return !late_.empty();
}

at::Tensor Bucket::late_gradients() {
  at::Tensor late = at::zeros_like(gradients_);
  const std::vector<at::Tensor> taken = std::exchange(late_, {});
  for (size_t i = 0; i < taken.size(); ++i)
    if (taken[i].defined()) place_in(late, i).copy_(taken[i]);
  return late;
}

std::vector<size_t> Bucket::finish() {
  at::NoGradGuard no_grad;
  std::vector<size_t> unused;
  for (size_t i = 0; i < slots_.size(); ++i) {
    GradientSlot& slot = slots_[i];
    const bool used = slot.is_used() || used_[static_cast<int64_t>(i)].item().toComplexDouble().real() > 0;
    slot.finish(used);
    if (!used) unused.push_back(i);
  }
  reset();
  return unused;
}

void Bucket::reset() {
  for (GradientSlot& slot : slots_) slot.reset();
  late_.clear();
  missing_ = slots_.size();
  streams_.forget();
}

}  // namespace lockstep
