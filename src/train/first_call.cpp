#include "train/first_call.h"

#include <algorithm>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/gradient_marks.h"

namespace lockstep::detail {
namespace {

at::Tensor some_of(const at::Tensor& output) {
  constexpr int64_t kMost = 16;
  if (!output.defined() || !output.is_cpu() || output.layout() != at::kStrided || output.numel() == 0 ||
      output.is_complex() || output.is_quantized())
    return {};
  const at::Tensor places =
      at::linspace(0, static_cast<double>(output.numel() - 1), std::min(kMost, output.numel()), at::kDouble);
  return at::take(output.detach(), places.to(at::kLong));
}

/// The relative change, of the largest value, that rounding may cause.
double tolerance(at::ScalarType type) {
  if (type == at::kBFloat16 || type == at::kHalf) return 2e-2;
  return type == at::kDouble ? 1e-10 : 1e-4;
}

}  // namespace

ModuleMarks::ModuleMarks(const Modules& modules) {
  for (const auto& top : modules) {
    for (const auto& module : top->modules()) layers_.emplace_back(module.get(), module->is_training());
    for (const auto& item : top->named_parameters())
      parameters_.emplace_back(item.value().unsafeGetTensorImpl(), mark_of(item.value()));
  }
}

void ModuleMarks::check_unchanged(const Modules& modules) const {
  const ModuleMarks now(modules);
  TORCH_CHECK(now.layers_ == layers_ && now.parameters_.size() == parameters_.size(),
              "checkpoint(): the module was switched between train() and eval(), or given other layers, after the call "
              "whose backward this is, so the second call would compute something else; run backward first");
  size_t number = 0;
  for (const auto& top : modules)
    for (const auto& item : top->named_parameters()) {
      TORCH_CHECK(now.parameters_[number] == parameters_[number], "checkpoint(): parameter ", item.key(),
                  " was changed after the call whose backward this is, as by optimizer.step(), so its activations "
                  "cannot be computed again; run backward first");
      ++number;
    }
}

FirstBuffers::FirstBuffers(const Modules& modules) {
  for (const auto& module : modules)
    for (const auto& item : module->named_buffers())
      if (item.value().defined())
        all_.push_back({.name = item.key(), .now = item.value(), .first = item.value().detach().clone(), .mark = 0});
}

void FirstBuffers::drop_unchanged() {
  for (Buffer& buffer : all_) {
    if (at::equal(buffer.now, buffer.first)) buffer.first.reset();
    buffer.mark = mark_of(buffer.now);
  }
}

void FirstBuffers::check_unchanged() const {
  for (const Buffer& buffer : all_)
    TORCH_CHECK(buffer.first.defined() || buffer.mark == mark_of(buffer.now), "checkpoint(): buffer ", buffer.name,
                " was changed after the call whose backward this is, so the second call would compute something else; "
                "run backward first");
}

FirstBuffers::Guard::Guard(const FirstBuffers& buffers) {
  const at::NoGradGuard no_grad;
  for (const Buffer& buffer : buffers.all_) {
    if (!buffer.first.defined()) continue;
    before_.emplace_back(buffer.now, buffer.now.detach().clone());
    buffer.now.copy_(buffer.first);
  }
}

FirstBuffers::Guard::~Guard() {
  const at::NoGradGuard no_grad;
  for (const auto& [buffer, before] : before_) buffer.copy_(before);
}

SomeValues::SomeValues(const std::vector<at::Tensor>& outputs) {
  const at::NoGradGuard no_grad;
  for (const at::Tensor& output : outputs) values_.push_back(some_of(output));
}

int64_t SomeValues::first_other(const SomeValues& second) const {
  for (size_t i = 0; i < values_.size(); ++i) {
    if (!values_[i].defined() || !second.values_[i].defined()) continue;
    const double share = tolerance(values_[i].scalar_type());
    const at::Tensor one = values_[i].to(at::kDouble), other = second.values_[i].to(at::kDouble);
    const double scale = at::nan_to_num(one, 0, 0, 0).abs().max().item<double>();
    if (!at::allclose(one, other, share, share * scale, /*equal_nan=*/true)) return static_cast<int64_t>(i);
  }
  return -1;
}

}  // namespace lockstep::detail
