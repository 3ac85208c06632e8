#include "optim/kernel_slices.h"

#include <cstring>

#include <ATen/ATen.h>

#include "base/hash.h"
#include "checkpoint/master_state.h"

namespace lockstep::detail {
namespace {

uint64_t hash_of(const optim::StepConstants& constants) {
  uint64_t hash = Hash::kStart;
  for (const double value : {constants.weight_decay, constants.decay, constants.step_size, constants.momentum,
                             constants.dampened, constants.beta2, constants.root, constants.eps}) {
    uint64_t word;
    std::memcpy(&word, &value, sizeof word);
    hash = Hash::mixed(hash, word);
  }
  return hash;
}

}  // namespace

SliceStepper::Outlook KernelSlices::prepare(const torch::optim::Optimizer& optimizer, const StepGradients& gradients) {
  // refresh() may have found a frozen parameter.
  intents_ = optim::intents_of(optimizer, formula_, [&](const at::Tensor& one) { return gradients.has(one); });
  Outlook outlook{.parameters = {}, .hash = Hash::kStart};
  for (const optim::Intent& intent : intents_) {
    outlook.parameters.push_back(intent.parameter);
    outlook.hash = Hash::mixed(outlook.hash, areas_.place_of(intent.parameter));
    outlook.hash = Hash::mixed(outlook.hash, static_cast<uint64_t>(intent.algorithm));
    outlook.hash = Hash::mixed(outlook.hash, hash_of(intent.constants));
  }
  return outlook;
}

int64_t KernelSlices::run(torch::optim::Optimizer& optimizer, const StepGradients& gradients) {
  std::vector<optim::Plan> plans;
  for (const optim::Intent& intent : intents_) plans.push_back(plan(optimizer, gradients, intent));
  return optim::run(plans);
}

at::Tensor KernelSlices::adopt(const std::string& name, const Areas::Parameter& parameter, const at::Tensor& held,
                               at::ScalarType dtype) {
  const at::Tensor& array = areas_.array(parameter, name, dtype);
  if (held.defined() && held.is_alias_of(array)) return held;
  // If the state is new, or loaded, this rank copies its slice, which is all that it will read.
  if (const int64_t begin = parameter.begin, count = parameter.end - begin; count > 0) {
    const at::Tensor mine = areas_.mine(array, parameter);
    if (held.defined())
      mine.copy_(optim::laid_out(held, dtype, parameter.tensor)
                     .as_strided({parameter.tensor.numel()}, {1})
                     .narrow(0, begin, count));
    else
      mine.zero_();
  }
  return Areas::view(array, parameter);
}

optim::Plan KernelSlices::plan(torch::optim::Optimizer& optimizer, const StepGradients& gradients,
                               const optim::Intent& intent) {
  const Areas::Parameter& parameter = areas_.parameter_of(intent.parameter);
  const Areas::Area& area = areas_.area_of(parameter);
  const bool masters = masters_ && optim::is_16_bit(area.dtype);
  const at::ScalarType dtype = masters ? at::kFloat : area.dtype;
  optim::Plan result = optim::plan_of(intent, gradients.source(intent), masters);
  result.begin = parameter.begin;
  result.end = parameter.end;
  for (std::byte* other : area.others)
    result.copies.push_back(other + static_cast<size_t>(parameter.offset) * result.element);
  const int arrays = optim::state_arrays(intent.algorithm);
  if (arrays == 0 && !masters) return result;
  auto& state = optim::state_of(optimizer, intent.parameter, formula_, masters);
  for (int a = 0; a < arrays; ++a) {
    const at::Tensor array = adopt(std::to_string(a), parameter, formula_.array(state, a), dtype);
    formula_.set_array(state, a, array);
    result.arrays[static_cast<size_t>(a)] = static_cast<std::byte*>(array.mutable_data_ptr());
  }
  if (masters) {
    at::Tensor& master = dynamic_cast<Master&>(state).master_param;
    master = adopt("master", parameter, master, at::kFloat);
    result.master = static_cast<std::byte*>(master.mutable_data_ptr());
  }
  formula_.count(state);
  return result;
}

}  // namespace lockstep::detail
