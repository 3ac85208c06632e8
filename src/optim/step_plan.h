#pragma once

#include <array>
#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include "optim/formula.h"
#include "optim/gradient_source.h"

namespace lockstep::optim {

/// A parameter's update in a step, before its memory is inspected.
struct Intent {
  at::Tensor parameter;
  Algorithm algorithm;
  StepConstants constants;
};

/// One for each parameter that is stepped, in the order of the groups.
std::vector<Intent> intents_of(const torch::optim::Optimizer& optimizer, const Formula& formula,
                               const std::function<bool(const at::Tensor&)>& is_stepped);

/// Where the first of its parameters is; the CPU if it has none.
c10::Device device_of(const torch::optim::Optimizer& optimizer);

/// The first thing that keeps these parameters from being stepped, as a sentence; empty if there is none. Those on the
/// CPU are stepped by kernels, those on a device by the optimizer itself, and all are in one place.
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
  GradientSource gradient;
  std::byte* parameter;
  std::byte* master = nullptr;
  std::array<std::byte*, 3> arrays{};
  std::vector<std::byte*> copies{};  ///< of the parameter, written too
  size_t element, state_element;     ///< their bytes
  int64_t begin = 0, end;            ///< the elements that are stepped
};
/// `master`: Plan::master is going to be set.
Plan plan_of(const Intent& intent, GradientSource gradient, bool master);
/// The gradient in .grad.
GradientSource own_gradient(const Intent& intent);

/// Steps them all; large ones in pieces that the intra-op threads share out. Returns how many bytes it has read and
/// written.
int64_t run(const std::vector<Plan>& plans);

}  // namespace lockstep::optim
