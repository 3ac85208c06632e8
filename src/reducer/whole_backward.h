#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/edge.h>

namespace torch::autograd {
struct Node;
}

namespace lockstep {

/// Marks the operation that made `result`: it runs its own backward, which computes all gradients of its inputs, so
/// autograd cannot ask it for only some.
void needs_whole_backward(const at::Tensor& result);

/// Whether one of the results of `operation` was given to needs_whole_backward().
bool runs_backward_itself(const torch::autograd::Node& operation);

/// Called when a backward begins from `roots` for the gradients of `asked` only. Throws c10::Error if some of these may
/// be within such an operation, because no other way leads to them.
void check_whole_backward(const std::vector<torch::autograd::Edge>& roots,
                          const std::vector<torch::autograd::Edge>& asked);

/// Whether `results` were computed by operations that this thread ran before `number` (at::sequence_number::peek()
/// then).
bool reaches_older(const std::vector<at::Tensor>& results, uint64_t number);

}  // namespace lockstep
