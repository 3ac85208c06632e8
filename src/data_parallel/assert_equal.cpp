#include <sstream>

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>

#include <lockstep/assert_equal.h>
#include <lockstep/error.h>

#include "base/text.h"
#include "data_parallel/divergence.h"
#include "rank_page/operation_label.h"

namespace lockstep {
namespace {

std::string describe(const NamedTensors& tensors) {
  std::ostringstream text;
  for (const auto& [name, tensor] : tensors) {
    text << name << ": ";
    if (tensor.defined()) {
      text << c10::toString(tensor.scalar_type()) << ' ' << tensor.sizes() << '\n';
    } else {
      text << "undefined\n";
    }
  }
  return text.str();
}

}  // namespace

void assert_equal_across_ranks(const Group& group, const NamedTensors& tensors) {
  if (group.world_size() == 1) return;
  const OperationLabel label("assert_equal_across_ranks()");
  constexpr const char* kProblem = "the ranks do not hold the same tensors: ";
  const std::string other = first_difference("tensor", group.all_gather_bytes(describe(tensors)));
  if (!other.empty()) throw Error(kProblem + other);
  NamedTensors defined;
  for (const auto& named : tensors)
    if (named.second.defined()) defined.push_back(named);
  const std::string odd = difference_of_ranks(group, defined);
  if (!odd.empty()) throw Error(kProblem + odd);
}

void assert_equal_across_ranks(const Group& group, const std::string& name, const at::Tensor& tensor) {
  assert_equal_across_ranks(group, NamedTensors{{name, tensor}});
}

void assert_equal_across_ranks(const Group& group, const torch::nn::Module& module) {
  NamedTensors tensors;
  for (const auto& parameter : module.named_parameters()) tensors.emplace_back(parameter.key(), parameter.value());
  for (const auto& buffer : module.named_buffers()) tensors.emplace_back(buffer.key(), buffer.value());
  assert_equal_across_ranks(group, tensors);
}

void assert_equal_across_ranks(const Group& group, const torch::jit::Module& module) {
  NamedTensors tensors;
  for (const auto& parameter : module.named_parameters()) tensors.emplace_back(parameter.name, parameter.value);
  for (const auto& buffer : module.named_buffers()) tensors.emplace_back(buffer.name, buffer.value);
  assert_equal_across_ranks(group, tensors);
}

}  // namespace lockstep
