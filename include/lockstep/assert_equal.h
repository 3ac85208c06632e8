#pragma once

#include <string>

#include <ATen/core/Tensor.h>

#include <lockstep/group.h>
#include <lockstep/named_tensors.h>

namespace torch {
namespace nn {
class Module;
}
namespace jit {
struct Module;
}
}  // namespace torch

namespace lockstep {

/// Throws the same Error on all ranks unless every tensor has the same name, shape, dtype and bits on each. The Error
/// names the first tensor that differs and the ranks that differ from the majority. Bits are compared: NaN equals
/// itself, and 0 is not -0. An undefined tensor (such as a gradient) equals another undefined one. A collective: every
/// rank must call it. It sends names, shapes and hashes, never the elements.
void assert_equal_across_ranks(const Group& group, const NamedTensors& tensors);
/// As above, for one tensor; `name` appears in the message.
void assert_equal_across_ranks(const Group& group, const std::string& name, const at::Tensor& tensor);
/// As above, for all parameters and buffers.
void assert_equal_across_ranks(const Group& group, const torch::nn::Module& module);
void assert_equal_across_ranks(const Group& group, const torch::jit::Module& module);

}  // namespace lockstep
