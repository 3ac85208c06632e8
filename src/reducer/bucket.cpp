#include "reducer/bucket.h"

#include <cstring>
#include <functional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include "reducer/bucket_plan.h"
#include "reducer/gradient_hook.h"

namespace lockstep {
namespace {

/// The piece of `flat` that starts at `offset`, with the parameter's shape and, if it is dense, its strides: autograd
/// then accumulates into it without a copy. It shares memory with `flat` but is not an autograd view of it, because
/// Optimizer::zero_grad detaches gradients in place, which views refuse.
at::Tensor gradient_in(const at::Tensor& flat, int64_t offset, const at::Tensor& parameter) {
  const std::vector<int64_t> strides = parameter.is_non_overlapping_and_dense()
                                           ? parameter.strides().vec()
                                           : at::empty(parameter.sizes(), at::kMeta).strides().vec();
  return at::empty({0}, flat.options()).set_(flat.storage(), offset, parameter.sizes(), strides);
}

/// The address of a small contiguous gradient in CPU memory, else null.
void* small_place(const at::Tensor& gradient) {
  constexpr size_t kSmall = 16 << 10;
  return gradient.is_cpu() && gradient.is_contiguous() && gradient.nbytes() <= kSmall ? gradient.mutable_data_ptr()
                                                                                      : nullptr;
}

}  // namespace

Bucket::Bucket(std::vector<at::Tensor> parameters, const Group& group, int64_t notes) : missing_(parameters.size()) {
  at::NoGradGuard no_grad;
  const auto count = static_cast<int64_t>(parameters.size());
  std::vector<int64_t> numbers;
  for (const auto& parameter : parameters) numbers.push_back(parameter.numel());
  const std::vector<int64_t> places = bucket_layout(numbers, parameters.front().element_size());
  const int64_t elements = places.back();
  flat_ = group.allocate(elements + count + notes, parameters.front().options().requires_grad(false));
  gradients_ = flat_.narrow(0, 0, elements);
  tail_ = flat_.narrow(0, elements, count + notes);
  used_ = tail_.narrow(0, 0, count);
  notes_ = tail_.narrow(0, count, notes);
  for (size_t i = 0; i < parameters.size(); ++i) {
    at::Tensor gradient = gradient_in(flat_, places[i], parameters[i]);
    void* const place = small_place(gradient);
    slots_.push_back({.parameter = std::move(parameters[i]),
                      .gradient = std::move(gradient),
                      .elements = numbers[i],
                      .small_place = place});
  }
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
    end = begin + slots_[i].elements;
  }
}

int64_t Bucket::bytes() const { return static_cast<int64_t>(flat_.nbytes()); }

const char* Bucket::problem(size_t index) const {
  return gradient_problem(slots_[index].parameter, slots_[index].elements, flat_.device());
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

void Bucket::copy_in(const Slot& slot, const at::Tensor& gradient) const {
  // With a thousand small tensors, most of the time would go into the dispatch of copy_, and much of the rest into
  // reading slot.gradient, which has left the caches since the last step.
  if (slot.small_place != nullptr && gradient.is_cpu() && gradient.is_contiguous() && !gradient.is_conj() &&
      !gradient.is_neg() && gradient.scalar_type() == flat_.scalar_type() && gradient.sizes() == slot.parameter.sizes())
    std::memcpy(slot.small_place, gradient.const_data_ptr(), gradient.nbytes());
  else
    slot.gradient.copy_(gradient);
}

void Bucket::part_with_handles(Slot& slot) {
  // The reference count is in a cache line that is written below anyway, when .grad is set.
  if (!is_held_elsewhere(slot.gradient)) return;
  at::Tensor theirs = std::exchange(slot.gradient, gradient_in(flat_, slot.gradient.storage_offset(), slot.gradient));
  theirs.set_(theirs.clone());
}

void Bucket::keep(Slot& slot) {
  slot.kept = slot.parameter.grad();
  slot.content = lies_here(slot.kept) ? slot.kept.clone() : at::Tensor();
}

const char* Bucket::fill(size_t index, bool used, bool counts) {
  at::NoGradGuard no_grad;
  Slot& slot = slots_[index];
  const char* why = problem(index);
  const at::Tensor& gradient = slot.parameter.grad();
  const bool here = lies_here(gradient);
  if (!here) part_with_handles(slot);
  slot.used = used && why == nullptr && gradient.defined();
  slot.used ? slot.kept.reset() : keep(slot);
  if (!counts) forget_reduced(index);
  if (why != nullptr || !gradient.defined()) {
    slot.gradient.zero_();
  } else if (!here) {
    copy_in(slot, gradient);
  }
  if (slot.used) slot.parameter.mutable_grad() = slot.gradient;
  if (!slot.filled) --missing_;
  slot.filled = true;
  if (!flat_.is_cpu()) streams_.note(flat_.device());
  return why;
}

at::Tensor Bucket::place_in(const at::Tensor& flat, size_t index) const {
  const at::Tensor& gradient = slots_[index].gradient;
  return gradient_in(flat, flat.storage_offset() + offset_of(index), gradient);
}

void Bucket::fill_sum(size_t index, const at::Tensor* sum, bool used) {
  at::NoGradGuard no_grad;
  Slot& slot = slots_[index];
  if (!lies_here(slot.parameter.grad())) part_with_handles(slot);
  slot.used = used;
  used ? slot.kept.reset() : keep(slot);
  if (sum != nullptr && sum->defined())
    copy_in(slot, *sum);
  else if (sum != nullptr)
    slot.gradient.zero_();
  // Whatever is accumulated after this is added to the sum where it lies here, and can be told apart where it does not.
  if (used && sum != nullptr) slot.parameter.mutable_grad() = slot.gradient;
  if (!slot.filled) --missing_;
  slot.filled = true;
}

void Bucket::fill_with_zeros() {
  at::NoGradGuard no_grad;
  for (Slot& slot : slots_) {
    if (!lies_here(slot.parameter.grad())) part_with_handles(slot);
    keep(slot);
    slot.used = false;
    slot.filled = true;
  }
  gradients_.zero_();
  missing_ = 0;
}

void Bucket::forget_reduced(size_t index) {
  Slot& slot = slots_[index];
  if (!std::exchange(slot.reduced, false)) return;
  at::NoGradGuard no_grad;
  if (lies_here(slot.parameter.grad())) slot.gradient.zero_();
}

void Bucket::write_flags() {
  streams_.follow();
  bool all_used = true;
  for (const Slot& slot : slots_) all_used = all_used && slot.used;
  used_.fill_(1);
  for (size_t i = 0; !all_used && i < slots_.size(); ++i)
    if (!slots_[i].used) used_[static_cast<int64_t>(i)].zero_();
}

void Bucket::launch(const Group& group, ReduceOp op) {
  at::NoGradGuard no_grad;
  write_flags();
  work_ = group.all_reduce_async(flat_, op);
  let_go_of_gradients();
}

/// What `body` throws, or an empty string.
static std::string failure_of(const std::function<void()>& body) {
  try {
    body();
  } catch (const c10::Error& error) {
    return std::string("failed: ") + error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("failed: ") + error.what();
  } catch (...) {
    return "failed: it threw something that is not a std::exception";
  }
  return "";
}

std::string Bucket::launch_by(CommHook& hook, const Group& group, ReduceOp op, int64_t index, bool last) {
  at::NoGradGuard no_grad;
  write_flags();
  clear_gaps();  // a hook that threw has not been waited for
  handed_ = gradients_.view(gradients_.sizes());
  GradientBucket bucket{index, last, op, handed_, {}};
  for (const Slot& slot : slots_) bucket.parts.push_back(slot.gradient.detach());
  handed_parts_ = bucket.parts;
  std::string problem = failure_of([&] { finish_ = hook.reduce(bucket, group); });
  if (problem.empty() && !finish_)
    problem = "returned no function, so nobody would wait for what it has started and put the result into `gradients`; "
              "return [] {} where nothing is left to do";
  tail_waits_ = last;
  if (!last) work_ = group.all_reduce_async(tail_, op);
  let_go_of_gradients();
  return problem;
}

void Bucket::reduce_tail(const Group& group, ReduceOp op) {
  tail_waits_ = false;
  group.all_reduce(tail_, op);
}

void Bucket::let_go_of_gradients() {
  for (Slot& slot : slots_)
    if (slot.used) slot.parameter.mutable_grad().reset();
}

std::string Bucket::wait() {
  at::NoGradGuard no_grad;
  if (work_) std::exchange(work_, std::nullopt)->wait();
  const auto finish = std::exchange(finish_, nullptr);
  const at::Tensor handed = std::exchange(handed_, at::Tensor());
  const std::vector<at::Tensor> parts = std::exchange(handed_parts_, {});
  if (!finish) return "";
  std::string problem = failure_of(finish);
  clear_gaps();  // the norm of all gradients is that of the whole
  if (problem.empty() && (handed.sizes() != gradients_.sizes() || handed.const_data_ptr() != gradients_.const_data_ptr()))
    problem = "has given `gradients` another size or other memory, where nobody looks; copy_() the result into it";
  for (size_t i = 0; i < parts.size() && problem.empty(); ++i)
    if (const at::Tensor& known = slots_[i].gradient;
        parts[i].sizes() != known.sizes() || parts[i].const_data_ptr() != known.const_data_ptr())
      problem =
          "has given a tensor of `parts` another size or other memory, where nobody looks; copy_() the result into it";
  return problem;
}

at::Tensor Bucket::gradient_here(size_t index) const {
  const at::Tensor& gradient = slots_[index].parameter.grad();
  return lies_here(gradient) ? gradient : at::Tensor();
}

bool Bucket::take_late() {
  bool any = false;
  for (Slot& slot : slots_) {
    if (slot.used) slot.late = std::exchange(slot.parameter.mutable_grad(), at::Tensor());
    any = any || slot.late.defined();
  }
  return any;
}

void Bucket::reduce_late(const Group& group, ReduceOp op, double weight) {
  at::NoGradGuard no_grad;
  const at::Tensor late = at::zeros_like(gradients_);
  for (size_t i = 0; i < slots_.size(); ++i)
    if (const at::Tensor gradient = std::exchange(slots_[i].late, at::Tensor()); gradient.defined())
      place_in(late, i).copy_(gradient);
  if (weight != 1) weight == 0 ? late.zero_() : late.mul_(weight);
  group.all_reduce(late, op);
  gradients_.add_(late);
}

void Bucket::adopt(size_t index, bool reduced) {
  Slot& slot = slots_[index];
  const at::Tensor& gradient = slot.parameter.grad();
  if (!gradient.defined() || problem(index) != nullptr) return;
  at::NoGradGuard no_grad;
  slot.gradient.copy_(gradient);
  slot.parameter.mutable_grad() = slot.gradient;
  slot.reduced = reduced;
}

std::vector<size_t> Bucket::finish() {
  at::NoGradGuard no_grad;
  std::vector<size_t> unused;
  at::Tensor flags;  // copied at once: each read of a device's memory waits for the device
  for (size_t i = 0; i < slots_.size(); ++i) {
    Slot& slot = slots_[i];
    slot.reduced = true;
    if (!slot.used && !flags.defined()) flags = used_.cpu();
    const bool used = slot.used || flags[static_cast<int64_t>(i)].item().toComplexDouble().real() > 0;
    slot.parameter.mutable_grad() = used ? slot.gradient : slot.kept;
    if (used) continue;
    unused.push_back(i);
    if (slot.content.defined()) slot.kept.copy_(slot.content);
  }
  reset();
  return unused;
}

void Bucket::reset() {
  if (launched()) wait();  // the engine may still write into flat_
  tail_waits_ = false;
  for (Slot& slot : slots_) {
    slot.filled = slot.used = false;
    slot.kept.reset();
    slot.content.reset();
    slot.late.reset();
  }
  missing_ = slots_.size();
  streams_.forget();
}

}  // namespace lockstep
