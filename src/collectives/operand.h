#pragma once

#include <functional>

#include <ATen/ATen.h>

// A user's tensor as engines see it.

namespace lockstep {

/// The tensor, with autograd's zero tensors, which have no memory, replaced by zeros in memory.
inline at::Tensor with_memory(const at::Tensor& tensor) {
  return tensor._is_zerotensor() ? at::zeros(tensor.sizes(), tensor.options()) : tensor;
}

/// A dense tensor that an engine can work on, and the user's tensor, to copy the result back to.
struct Operand {
  at::Tensor original;
  at::Tensor dense;

  explicit Operand(const at::Tensor& tensor)
      : original(tensor.detach()), dense(with_memory(original).resolve_conj().resolve_neg().contiguous()) {}

  /// Null if the engine works on the user's memory itself.
  std::function<void()> copy_back() const {
    if (dense.is_same(original)) return nullptr;
    return [operand = *this] { operand.original.copy_(operand.dense); };
  }
};

/// The elements of a contiguous tensor, [tensor.numel()].
inline at::Tensor as_flat(const at::Tensor& dense) {
  return dense.numel() == 0 ? dense.reshape({0}) : dense.as_strided({dense.numel()}, {1});
}

/// The bytes of a contiguous tensor, [tensor.nbytes()].
inline at::Tensor as_bytes(const at::Tensor& dense) {
  if (dense.numel() == 0) return at::empty({0}, dense.options().dtype(at::kByte));
  // A tensor of one element counts as contiguous whatever its stride, but not every stride can be viewed as bytes.
  return dense.as_strided({dense.numel()}, {1}).view(at::kByte);
}

/// One row of bytes per rank, for gather and scatter: [rows, bytes of a row].
inline at::Tensor as_byte_rows(const at::Tensor& dense, int64_t rows) {
  const at::Tensor bytes = as_bytes(dense);
  return bytes.view({rows, rows == 0 ? 0 : bytes.numel() / rows});
}

inline int64_t bytes_of(const at::Tensor& tensor) { return static_cast<int64_t>(tensor.nbytes()); }

/// A copy in CPU memory; the tensor itself if it is there already.
inline at::Tensor on_cpu(const at::Tensor& tensor) { return tensor.is_cpu() ? tensor : tensor.cpu(); }

/// Whether an engine can work on the tensor's memory directly.
inline bool is_plain(const at::Tensor& tensor) {
  return tensor.is_contiguous() && tensor.device().is_cpu() && !tensor.is_conj() && !tensor.is_neg() &&
         !tensor._is_zerotensor();
}

}  // namespace lockstep
