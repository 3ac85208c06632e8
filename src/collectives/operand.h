#pragma once

#include <functional>

#include <ATen/ATen.h>

// The forms in which engines see a user's tensor.

namespace lockstep {

/// A dense tensor an engine can work on, and the way home if that is a copy.
struct Operand {
  at::Tensor home;
  at::Tensor dense;

  explicit Operand(const at::Tensor& tensor)
      : home(tensor.detach()), dense(home.resolve_conj().resolve_neg().contiguous()) {}

  std::function<void()> copy_home() const {
    if (dense.is_same(home)) return nullptr;
    return [operand = *this] { operand.home.copy_(operand.dense); };
  }
};

/// The bytes of a contiguous tensor, [tensor.nbytes()].
inline at::Tensor as_bytes(const at::Tensor& dense) {
  if (dense.numel() == 0) return at::empty({0}, dense.options().dtype(at::kByte));
  // A tensor of one element is contiguous whatever its stride, with which it would have no view as bytes.
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

/// One row of bytes a rank, for whatever is gathered or scattered: [rows, bytes of a row].
inline at::Tensor as_byte_rows(const at::Tensor& dense, int64_t rows) {
  const at::Tensor bytes = as_bytes(dense);
  return bytes.view({rows, rows == 0 ? 0 : bytes.numel() / rows});
}

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

/// The same values in CPU memory.
inline at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.cpu(); }

/// Whether an engine can work on the tensor's memory as it lies.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg();
}

}  // namespace lockstep
