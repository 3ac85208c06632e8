#include "collectives/operand_checks.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>

#include "collectives/operand.h"

namespace lockstep {

void check_tensor(const char* operation, const char* role, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), operation, ": the ", role, " is an undefined tensor; allocate it first");
  TORCH_CHECK(tensor.layout() == at::kStrided, operation, ": the ", role,
              " is sparse; make it dense first, e.g. with to_dense()");
}

void check_reduction(const char* operation, const at::Tensor& tensor, ReduceOp op) {
  const bool numbers = tensor.is_floating_point() || tensor.is_complex();
  TORCH_CHECK(op != ReduceOp::kMean || numbers, operation, ": the mean of ", tensor.scalar_type(),
              " tensors is not defined; use kSum, or a floating point tensor");
  TORCH_CHECK((op != ReduceOp::kAnd && op != ReduceOp::kOr) || !numbers, operation,
              ": kAnd and kOr work on integer and bool tensors, not on ", tensor.scalar_type());
}

void check_rows(const char* operation, const char* role, const at::Tensor& rows, const at::Tensor& row,
                int world_size) {
  TORCH_CHECK(rows.numel() == row.numel() * world_size && rows.scalar_type() == row.scalar_type(), operation, ": the ",
              role, " must be ", row.scalar_type(), " with ", row.numel(), " x ", world_size,
              " elements, one row for each rank; it is ", rows.scalar_type(), " with ", rows.numel());
}

void check_written(const char* operation, const at::Tensor& tensor) {
  if (is_plain(tensor)) return;
  TORCH_CHECK(at::has_internal_overlap(tensor) != at::MemOverlap::Yes, operation,
              ": several elements of a tensor that is written share memory, as after expand(); clone() it first");
}

void check_apart(const char* operation, const at::Tensor& rows, const at::Tensor& row, int own) {
  // Of tensors that are not contiguous a copy travels.
  if (!rows.is_contiguous() || !row.is_contiguous() || rows.numel() == 0 || row.numel() == 0) return;
  if (rows.device() != row.device() || !rows.has_storage() || !row.has_storage()) return;
  const auto* first = static_cast<const char*>(rows.const_data_ptr());
  const auto* second = static_cast<const char*>(row.const_data_ptr());
  if (first == nullptr || second == nullptr) return;
  if (first + rows.nbytes() <= second || second + row.nbytes() <= first) return;
  if (own >= 0 && second == first + static_cast<size_t>(own) * row.nbytes()) return;
  TORCH_CHECK(false, operation, ": the input and the output share memory",
              own >= 0 ? ", and not as this rank's own row" : "",
              "; ranks would read what is being written. Use another tensor, or clone() one of them");
}

void note_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace lockstep
