#include <functional>

#include <ATen/ATen.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/sgd.h>

#include <lockstep/checkpoint.h>
#include <lockstep/error.h>

namespace lockstep {
namespace {

using torch::optim::Optimizer;
using torch::optim::OptimizerParamState;

/// One remembered tensor of one parameter, under PyTorch's name: how to read it and how to put it back.
struct Field {
  const char* name;
  std::function<at::Tensor(OptimizerParamState&)> get;
  std::function<void(OptimizerParamState&, const at::Tensor&)> set;
};

struct Kind {
  std::vector<Field> fields;
  std::function<std::unique_ptr<OptimizerParamState>()> make;
};

template <typename State>
Field tensor_field(const char* name, at::Tensor& (State::*mutable_access)()) {
  return {name, [=](OptimizerParamState& state) { return (static_cast<State&>(state).*mutable_access)(); },
          [=](OptimizerParamState& state, const at::Tensor& value) {
            (static_cast<State&>(state).*mutable_access)() = value.clone();
          }};
}

/// Python keeps the step as a float32 scalar.
template <typename State>
Field step_field() {
  return {"step",
          [](OptimizerParamState& state) { return at::scalar_tensor(static_cast<State&>(state).step(), at::kFloat); },
          [](OptimizerParamState& state, const at::Tensor& value) {
            static_cast<State&>(state).step(static_cast<int64_t>(value.item<double>()));
          }};
}

/// What Adam and AdamW remember. LibTorch overloads the accessors, hence the casts.
template <typename State>
Kind adam_kind() {
  using Access = at::Tensor& (State::*)();
  return {{step_field<State>(), tensor_field<State>("exp_avg", static_cast<Access>(&State::exp_avg)),
           tensor_field<State>("exp_avg_sq", static_cast<Access>(&State::exp_avg_sq)),
           tensor_field<State>("max_exp_avg_sq", static_cast<Access>(&State::max_exp_avg_sq))},
          [] { return std::make_unique<State>(); }};
}

Kind kind_of(const Optimizer& optimizer) {
  using torch::optim::SGDParamState;
  if (dynamic_cast<const torch::optim::SGD*>(&optimizer)) {
    using Access = at::Tensor& (SGDParamState::*)();
    return {{tensor_field<SGDParamState>("momentum_buffer", static_cast<Access>(&SGDParamState::momentum_buffer))},
            [] { return std::make_unique<SGDParamState>(); }};
  }
  if (dynamic_cast<const torch::optim::AdamW*>(&optimizer)) return adam_kind<torch::optim::AdamWParamState>();
  if (dynamic_cast<const torch::optim::Adam*>(&optimizer)) return adam_kind<torch::optim::AdamParamState>();
  TORCH_CHECK(false, "the state of this optimizer is not known to Lockstep; it knows SGD, Adam and AdamW");
}

std::vector<at::Tensor> parameters_of(const Optimizer& optimizer) {
  std::vector<at::Tensor> parameters;
  for (const auto& group : optimizer.param_groups())
    parameters.insert(parameters.end(), group.params().begin(), group.params().end());
  return parameters;
}

}  // namespace

StateDict state_dict(const Optimizer& optimizer) {
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  StateDict result;
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto found = optimizer.state().find(parameters[i].unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    for (const Field& field : kind.fields) {
      const at::Tensor value = field.get(*found->second);
      if (value.defined()) result.insert(std::to_string(i) + "." + field.name, value);
    }
  }
  return result;
}

void load_state_dict(Optimizer& optimizer, const StateDict& state) {
  const Kind kind = kind_of(optimizer);
  const auto parameters = parameters_of(optimizer);
  // Everything is built aside first, so that an error changes nothing.
  std::vector<std::unique_ptr<OptimizerParamState>> states(parameters.size());
  size_t used = 0;
  for (size_t i = 0; i < parameters.size(); ++i) {
    for (const Field& field : kind.fields) {
      const at::Tensor* value = state.find(std::to_string(i) + "." + field.name);
      if (value == nullptr) continue;
      if (value->dim() > 0 && value->sizes() != parameters[i].sizes())
        throw Error("the optimizer's " + std::to_string(i) + "." + field.name + " has another shape than parameter " +
                    std::to_string(i) + "; the state belongs to another model");
      if (!states[i]) states[i] = kind.make();
      field.set(*states[i], *value);
      ++used;
    }
  }
  if (used != state.size())
    throw Error("the optimizer's state has " + std::to_string(state.size() - used) +
                " entries that do not belong to it; "
                "it is of another kind of optimizer or of another model");
  for (size_t i = 0; i < parameters.size(); ++i)
    if (states[i]) optimizer.state()[parameters[i].unsafeGetTensorImpl()] = std::move(states[i]);
}

}  // namespace lockstep
