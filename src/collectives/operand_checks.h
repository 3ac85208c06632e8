#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>

#include "collectives/operand.h"

// Checks for arguments that Group refuses before anything is sent. Every message begins with the operation's name.

namespace lockstep {

// The checks that almost every tensor passes are inline: a small all_reduce takes a few hundred nanoseconds.

void refuse_unless_dense(const char* operation, const char* role, const at::Tensor& tensor);
inline void check_tensor(const char* operation, const char* role, const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) refuse_unless_dense(operation, role, tensor);
}

void refuse_unless_defined(const char* operation, const at::Tensor& tensor, ReduceOp op);
inline void check_reduction(const char* operation, const at::Tensor& tensor, ReduceOp op) {
  if (op != ReduceOp::kSum) refuse_unless_defined(operation, tensor, op);
}

void check_rows(const char* operation, const char* role, const at::Tensor& rows, const at::Tensor& row, int world_size);
/// Each element of a written tensor has its own memory.
void refuse_unless_written(const char* operation, const at::Tensor& tensor);
inline void check_written(const char* operation, const at::Tensor& tensor) {
  if (!is_plain(tensor)) refuse_unless_written(operation, tensor);
}

/// The tensors share no memory, except that `row` may be row `own` of `rows`; -1: it may not.
void check_apart(const char* operation, const at::Tensor& rows, const at::Tensor& row, int own);

/// check_apart() for lists of blocks whose outputs are written: no output shares memory with another tensor, except
/// that output `own_output` may be input `own_input`.
void check_lists_apart(const char* operation, const std::vector<at::Tensor>& outputs,
                       const std::vector<at::Tensor>& inputs, size_t own_output, size_t own_input);

/// The sum of the splits of an all_to_all, which are numbers of rows.
int64_t rows_of(const char* role, const std::vector<int64_t>& splits);

/// A message goes to another rank (in a world of one, to this rank), with a tag of at least 0.
void check_message(const char* operation, int peer, int tag, const Group& group);

/// Tells autograd that an operation writes the tensor, as PyTorch's in-place operations do.
inline void note_written(const at::Tensor& tensor) {
  if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace lockstep
