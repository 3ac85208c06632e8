#include "diloco/buffer_average.h"

#include <algorithm>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

namespace lockstep::diloco {
namespace {

std::vector<at::Tensor> with_numbers(const NamedTensors& buffers) {
  std::vector<at::Tensor> found;
  for (const auto& [name, buffer] : buffers)
    if (buffer.is_floating_point() || buffer.is_complex()) found.push_back(buffer.detach());
  return found;
}

at::Tensor as_real(const at::Tensor& buffer) {
  return buffer.is_complex() ? at::view_as_real(buffer.resolve_conj()) : buffer;
}

/// How a buffer's numbers travel.
at::ScalarType dtype_on_the_way(const at::Tensor& buffer) {
  return at::toRealValueType(buffer.scalar_type()) == at::kDouble ? at::kDouble : at::kFloat;
}

int64_t bytes_on_the_way(const at::Tensor& buffer) {
  return buffer.numel() * (buffer.is_complex() ? 2 : 1) *
         static_cast<int64_t>(c10::elementSize(dtype_on_the_way(buffer)));
}

}  // namespace

int64_t bytes_of_buffers(const NamedTensors& buffers) {
  int64_t bytes = 1;
  for (const at::Tensor& buffer : with_numbers(buffers)) bytes += bytes_on_the_way(buffer);
  return bytes;
}

std::string buffer_bytes(const NamedTensors& buffers) {
  const at::NoGradGuard no_grad;
  bool is_finite = true;
  std::string numbers;
  for (const at::Tensor& buffer : with_numbers(buffers)) {
    const at::Tensor real = as_real(buffer).to(at::kCPU, dtype_on_the_way(buffer)).contiguous();
    is_finite = is_finite && at::isfinite(real).all().item<bool>();
    numbers.append(static_cast<const char*>(real.const_data_ptr()), real.nbytes());
  }
  return static_cast<char>(is_finite ? 1 : 0) + numbers;
}

BufferAverage::BufferAverage(const NamedTensors& buffers) : buffers_(with_numbers(buffers)) {
  for (const at::Tensor& buffer : buffers_) sums_.push_back(at::zeros(as_real(buffer).sizes(), at::kDouble));
}

bool BufferAverage::add(std::string_view bytes) {
  if (bytes.front() == 0) return false;
  const at::NoGradGuard no_grad;
  ++added_;
  const char* from = bytes.data() + 1;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor one = at::empty(sums_[i].sizes(), dtype_on_the_way(buffers_[i]));
    if (one.nbytes() > 0) std::memcpy(one.mutable_data_ptr(), from, one.nbytes());
    from += one.nbytes();
    sums_[i] += one;
  }
  return true;
}

void BufferAverage::set() const {
  if (added_ == 0) return;
  const at::NoGradGuard no_grad;
  for (size_t i = 0; i < buffers_.size(); ++i) {
    const at::Tensor mean = sums_[i] / added_;
    at::Tensor(buffers_[i]).copy_(buffers_[i].is_complex() ? at::view_as_complex(mean) : mean);
  }
}

}  // namespace lockstep::diloco
