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

/// One intent for each stepped parameter, in the order of the groups.
std::vector<Intent> intents_of(const torch::optim::Optimizer& optimizer, const Formula& formula,
                               const std::function<bool(const at::Tensor&)>& is_stepped);

/// The device of the optimizer's first parameter; the CPU if it has none.
c10::Device device_of(const torch::optim::Optimizer& optimizer);

/// The first reason why these parameters cannot be stepped, as a sentence; empty if none. Kernels step parameters on
/// the CPU, the optimizer itself those on a device; all must be on one device.
std::string problem_of(const torch::optim::Optimizer& optimizer);

bool is_16_bit(at::ScalarType dtype);

/// The state of a parameter, made if missing, and with a master if it needs one.
torch::optim::OptimizerParamState& state_of(torch::optim::Optimizer& optimizer, const at::Tensor& parameter,
                                            const Formula& formula, bool master);

/// `tensor` with this dtype and the strides of `like`; the tensor itself if it has both.
at::Tensor laid_out(const at::Tensor& tensor, at::ScalarType dtype, const at::Tensor& like);

/// One parameter's step, as addresses in memory.
struct Plan {
  StepFunction function;
  StepConstants constants;
  GradientSource gradient;
  std::byte* parameter;
  std::byte* master = nullptr;
  std::array<std::byte*, 3> arrays{};
  std::vector<std::byte*> copies{};  ///< of the parameter, also written
  size_t element, state_element;     ///< their bytes
  int64_t begin = 0, end;            ///< the elements that are stepped
};
/// `master`: the caller will set Plan::master.
Plan plan_of(const Intent& intent, GradientSource gradient, bool master);
GradientSource own_gradient(const Intent& intent);

/// Runs all plans; intra-op threads share large ones in pieces. Returns the bytes read and written.
int64_t run(const std::vector<Plan>& plans);

}  // namespace lockstep::optim
