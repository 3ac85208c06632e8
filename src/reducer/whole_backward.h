#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// The operation that made `result` runs a backward of its own, which computes all gradients of what it has computed
/// with: those of some tensors alone cannot be asked of it.
void needs_whole_backward(const at::Tensor& result);

/// Whether one of the results of `operation` was given to needs_whole_backward().
bool runs_backward_itself(const torch::autograd::Node& operation);

/// A backward begins from `roots` for the gradients of `asked` alone. Throws c10::Error if some of these may be within
/// such an operation, since no other way leads to them.
void check_whole_backward(const std::vector<torch::autograd::Edge>& roots,
                          const std::vector<torch::autograd::Edge>& asked);

/// Whether operations that this thread has run before `number` (at::sequence_number::peek() then) are among those that
/// `results` were computed by.
bool reaches_older(const std::vector<at::Tensor>& results, uint64_t number);

}  // namespace lockstep
