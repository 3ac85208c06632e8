#include "data_parallel/virtual_buffers.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace lockstep {

VirtualBuffers::VirtualBuffers(const NamedTensors& buffers, const std::shared_ptr<VirtualRanks>& ranks) {
  at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    buffers_.push_back(buffer);
    before_.push_back(buffer.clone());
    kept_.push_back(at::empty_like(buffer));
  }
  listening_ = ranks->listen([this](std::optional<int>, std::optional<int> to) {
    if (to && !within_step_) untouched_ = true, before_forward();
  });
}

void VirtualBuffers::copy(std::vector<at::Tensor>& to, const std::vector<at::Tensor>& from) {
  at::NoGradGuard no_grad;
  for (size_t i = 0; i < to.size(); ++i) to[i].copy_(from[i]);
}

void VirtualBuffers::before_forward() {
  if (!untouched_ || within_step_) return;
  untouched_ = false;
  copy(before_, buffers_);
}

void VirtualBuffers::virtual_rank_done(bool took_part, bool last) {
  within_step_ = true;
  if (took_part && !is_kept_) copy(kept_, buffers_);
  is_kept_ = is_kept_ || took_part;
  copy(buffers_, last && is_kept_ ? kept_ : before_);
}

void VirtualBuffers::step_done() {
  is_kept_ = within_step_ = false;
  untouched_ = true;
  copy(before_, buffers_);
}

}  // namespace lockstep
