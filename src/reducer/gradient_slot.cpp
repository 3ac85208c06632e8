#include "reducer/gradient_slot.h"

#include <cstring>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/gradient_hook.h"

namespace lockstep {
namespace {

/// The address of a small contiguous gradient in CPU memory, else null.
void* small_place_of(const at::Tensor& gradient) {
  constexpr size_t kSmall = 16 << 10;
  return gradient.is_cpu() && gradient.is_contiguous() && gradient.nbytes() <= kSmall ? gradient.mutable_data_ptr()
                                                                                      : nullptr;
}

}  // namespace

at::Tensor gradient_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  const std::vector<int64_t> strides = parameter.is_non_overlapping_and_dense()
                                           ? parameter.strides().vec()
                                           : at::empty(parameter.sizes(), at::kMeta).strides().vec();
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, parameter.sizes(), strides);
}

const char* gradient_problem(const at::Tensor& parameter, int64_t elements, at::Device device) {
  const at::Tensor& gradient = parameter.grad();
  if (!gradient.defined()) return nullptr;
  if (gradient.layout() != at::kStrided)
    return "has a sparse gradient, which cannot be reduced; make the layer produce dense gradients (for an Embedding: "
           "sparse = false)";
  if (gradient.requires_grad())
    return "has a gradient that is itself differentiable (backward with create_graph), which cannot be reduced; use "
           "autograd::grad on the inputs, or on the plain module, instead";
  if (gradient.numel() != elements || gradient.device() != device)
    return "has a gradient whose size or device is not the one that the parameter had when it was attached; call "
           "refresh() on all ranks";
  return nullptr;
}

GradientSlot::GradientSlot(at::Tensor parameter, at::Tensor flat, int64_t offset)
    : parameter_(std::move(parameter)),
      flat_(std::move(flat)),
      gradient_(gradient_in(flat_, offset, parameter_)),
      elements_(parameter_.numel()),
      small_place_(small_place_of(gradient_)) {}

at::Tensor GradientSlot::gradient_here() const {
  const at::Tensor& gradient = parameter_.grad();
  return lies_here(gradient) ? gradient : at::Tensor();
}

bool GradientSlot::can_copy_bytes(const at::Tensor& gradient) const {
  return small_place_ != nullptr && gradient.is_cpu() && gradient.is_contiguous() && !gradient.is_conj() &&
         !gradient.is_neg() && gradient.scalar_type() == flat_.scalar_type() && gradient.sizes() == parameter_.sizes();
}

void GradientSlot::copy_in(const at::Tensor& gradient) const {
  // With a thousand small tensors, most of the time would go into the dispatch of copy_, and much of the rest into
  // reading gradient_, which has left the caches since the last step.
  if (can_copy_bytes(gradient))
    std::memcpy(small_place_, gradient.const_data_ptr(), gradient.nbytes());
  else
    gradient_.copy_(gradient);
}

bool GradientSlot::take_small() {
  at::Tensor& gradient = parameter_.mutable_grad();
  if (!gradient.defined() || gradient.layout() != at::kStrided || !can_copy_bytes(gradient) ||
      gradient.numel() != elements_ || gradient.requires_grad() || lies_here(gradient) || is_held_elsewhere(gradient_))
    return false;
  std::memcpy(small_place_, gradient.const_data_ptr(), gradient.nbytes());
  gradient = gradient_;
  kept_.reset();
  used_ = filled_ = true;
  return true;
}

void GradientSlot::part_with_handles() {
  // The reference count is in a cache line that is written below anyway, when .grad is set.
  if (!is_held_elsewhere(gradient_)) return;
  at::Tensor theirs = std::exchange(gradient_, gradient_in(flat_, gradient_.storage_offset(), gradient_));
  theirs.set_(theirs.clone());
}

void GradientSlot::keep() {
  kept_ = parameter_.grad();
  content_ = lies_here(kept_) ? kept_.clone() : at::Tensor();
}

const char* GradientSlot::fill(bool used, bool counts) {
  if (used && counts && take_small()) return nullptr;
  at::NoGradGuard no_grad;
  const char* why = problem();
  const at::Tensor& gradient = parameter_.grad();
  const bool here = lies_here(gradient);
  if (!here) part_with_handles();
  used_ = used && why == nullptr && gradient.defined();
  used_ ? kept_.reset() : keep();
  if (!counts) forget_reduced();
  if (why != nullptr || !gradient.defined()) {
    gradient_.zero_();
  } else if (!here) {
    copy_in(gradient);
  }
  if (used_) parameter_.mutable_grad() = gradient_;
  filled_ = true;
  return why;
}

void GradientSlot::fill_sum(const at::Tensor* sum, bool used) {
  if (!lies_here(parameter_.grad())) part_with_handles();
  used_ = used;
  used ? kept_.reset() : keep();
  if (sum != nullptr && sum->defined())
    copy_in(*sum);
  else if (sum != nullptr)
    gradient_.zero_();
  // Later gradients are added to the sum if it lies here, and can be distinguished if it does not.
  if (used && sum != nullptr) parameter_.mutable_grad() = gradient_;
  filled_ = true;
}

void GradientSlot::keep_unused() {
  if (!lies_here(parameter_.grad())) part_with_handles();
  keep();
  used_ = false;
  filled_ = true;
}

void GradientSlot::forget_reduced() {
  if (!std::exchange(reduced_, false)) return;
  at::NoGradGuard no_grad;
  if (lies_here(parameter_.grad())) gradient_.zero_();
}

void GradientSlot::adopt(bool reduced) {
  const at::Tensor& gradient = parameter_.grad();
  if (!gradient.defined() || problem() != nullptr) return;
  at::NoGradGuard no_grad;
  gradient_.copy_(gradient);
  parameter_.mutable_grad() = gradient_;
  reduced_ = reduced;
}

void GradientSlot::let_go_of_gradient() {
  if (used_) parameter_.mutable_grad().reset();
}

at::Tensor GradientSlot::set_aside_late() {
  return used_ ? std::exchange(parameter_.mutable_grad(), at::Tensor()) : at::Tensor();
}

void GradientSlot::finish(bool used) {
  reduced_ = true;
  parameter_.mutable_grad() = used ? gradient_ : kept_;
  if (!used && content_.defined()) kept_.copy_(content_);
}

void GradientSlot::reset() {
  filled_ = used_ = false;
  kept_.reset();
  content_.reset();
}

}  // namespace lockstep
