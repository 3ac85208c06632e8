#pragma once

#include <array>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "optim/formula.h"

namespace lockstep::optim {

/// What a step does to one parameter, before its memory is looked at.
struct Intent {
  at::Tensor parameter;  ///< with a gradient
  Algorithm algorithm;
  StepConstants constants;
};

/// One for each parameter that has a gradient, in the order of the groups.
std::vector<Intent> intents_of(const torch::optim::Optimizer& optimizer, const Formula& formula);

/// The first thing that the kernels cannot step, as a sentence; empty if there is none.
std::string problem_of(const torch::optim::Optimizer& optimizer);

bool is_16_bit(at::ScalarType dtype);

/// The state of a parameter, made if there is none, and made one with a master if it must have that.
torch::optim::OptimizerParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                                            const Formula& formula, bool master);

/// `tensor` in this dtype and with the strides of `like`; itself if it is so already.
at::Tensor laid_out(const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& like);

/// One parameter's step: where everything begins in memory.
struct Plan {
  StepFunction function;
  StepConstants constants;
  at::Tensor gradient;  ///< keeps what is read
  std::byte* parameter;
  std::byte* master = nullptr;
  std::array<std::byte*, 3> arrays{};
  std::vector<std::byte*> copies{};  ///< of the parameter, written too
  size_t element, state_element;     ///< their bytes
  int64_t begin = 0, end;            ///< the elements that are stepped
};
/// `master`: Plan::master is going to be set.
Plan plan_of(const Intent& intent, bool master);

/// Steps them all; large ones in pieces that the intra-op threads share out.
void run(const std::vector<Plan>& plans);

}  // namespace lockstep::optim
